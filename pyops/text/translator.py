"""The translators as one object: raw text in, raw text out.

    model = pyops.load('ckpt')                      a checkpoint, or a folder of them
    model.translate(['Go now.', 'I sleep.'])        ['Va maintenant.', 'Je dors.']

All programs that translate use it: there is no other path from text to token ids and back.
"""
from __future__ import annotations

import importlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from pyops import COMPUTE_TYPES, backend, checkpoint, programs
from pyops.errors import UserError
from pyops.text.decoding import BeamDecoder, Search, Supply, check_whole
from pyops.text.flags import BATCH_ROWS, BATCH_SIZE, BEAM, LENGTH_PENALTY
from pyops.text.pairs import Ragged, Sequences
from pyops.text.tokenizer import Tokenizer, restore
from pyops.text.vocabulary import BOS, PAD

if TYPE_CHECKING:
    from pyops.typing import PathLike

PROGRAMS = 'seq2seq', 'transformer'     # each has a module `translate` with build(settings, source_size, target_size) -> model
DECODERS = 8            # searches whose decoders are kept: each has a copy of the output layer, and plans
WINDOW = 32             # batches of a stream that are read before the first is translated, and sorted by length
WORKERS = 4             # most batches at the same time on the CPU: Python runs one of their threads at a time
_TOKENS = 5120          # source tokens of a batch on the CPU, if it has more than one text: they bound its memory
_GPU_ROWS = 64          # sentences of every batch on a GPU
_WORKER_ROWS = 16       # least hypotheses of a batch, if several are decoded at the same time
_PARTS = 4              # batches of a worker, if they have at least a fifth of the texts that a batch may have
_WEIGHTS = 1 << 20      # elements of an attention matrix of a batch, per head
_SHOWN = 60             # characters of a text in a warning
_DEVICE = threading.RLock()     # held during device work: the recording of a plan and the device are global to the process

T = TypeVar('T')
Texts = Sequence[str] | np.ndarray[Any, Any]
Many = Literal[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
               32]      # values of nbest: all up to LARGEST_BEAM with which a result is a list
Outputs = list[tuple[np.ndarray, float | None]]         # of a sentence: ids, score
Decode = Callable[[Sequences, 'Supply | None'], Iterator[list[tuple[int, Outputs]]]]       # as Decoder.stream


class Translation(NamedTuple):
    """A translation of a text.

    text        raw text; '' for a text without words
    score       log probability of the tokens / len(tokens) ** length_penalty; None if it was not computed
    source      the tokens that the model read, with the end mark
    tokens      the tokens of the translation, with the end mark if it has one
    cut         number of tokens, end mark included, by which the text is too long for the model: they were not read
    unknown     words of the text that are not in the vocabulary, each once
    alignment   float32 (len(tokens), len(source)): the weights of the attention to the source when each token was predicted,
                the mean over all heads; rows sum to 1.  None unless it was requested and the model has attention
    """
    text: str
    score: float | None
    source: list[str]
    tokens: list[str]
    cut: int = 0
    unknown: tuple[str, ...] = ()
    alignment: np.ndarray | None = None

    def too_long(self, text: str) -> str:
        """Return the end of a warning about a translated text: `cut` of its tokens were not read."""
        read, start = len(self.source), text if len(text) <= _SHOWN else text[:_SHOWN] + '...'
        return f'too long, only the first {read} of {read + self.cut} tokens, end mark included, are read: {start!r}'


class _Found(NamedTuple):
    """What the search found for a text.   source: the ids that were read;  outputs: pairs (ids, score), [] for a text without
    words"""
    words: list[str]
    source: np.ndarray
    cut: int
    outputs: Outputs


class About(NamedTuple):
    """What a program can say about a translator without its weights.

    kind: 'seq2seq', 'transformer', ...;  path: of the checkpoint, None without one;  num_steps, rounding: as of Translator
    """
    kind: str
    path: str | None
    num_steps: int
    rounding: str | None

    def search(self, beam: int = BEAM, nbest: int = 1, length_penalty: float = LENGTH_PENALTY,
               max_len: int | None = None) -> Search:
        """Return the settings of a search.   UserError if one is out of range, TypeError if one has another type"""
        search = Search(self.num_steps if max_len is None else max_len, beam, nbest, length_penalty)
        if search.max_len > self.num_steps:
            raise UserError(f'max_len: expected 1 to {self.num_steps}, the length of sentences in training, got {max_len}')
        return search


def load(path: PathLike, quant: str | None = None, quant_layers: str | None = None, compute: str = 'float32') -> Translator:
    """Load a translator from a checkpoint, or from the best or newest one of a folder, onto the current device.

    It may be a checkpoint of seq2seq.train, transformer.train or transformer.from_marian.
    quant, quant_layers: as --quant and --quant-layers (docs/quantization.md); None: as in the training run
    compute: 'float32', 'bf16' or 'int8', the type of the weights and of the factors of products (docs/compact.md)
    UserError if there is no such checkpoint, it is damaged or belongs to another program, or `compute` is impossible.
    """
    if compute not in COMPUTE_TYPES:
        raise UserError(f'compute: expected {", ".join(COMPUTE_TYPES[:-1])} or {COMPUTE_TYPES[-1]}, got {compute}')
    replaced = {'quant': quant, 'quant_layers': quant_layers, 'compute': compute}
    return of_checkpoint(checkpoint.find(path, serving=True, parameters_only=True), replaced)


def of_checkpoint(found: checkpoint.Found, replaced: dict[str, Any]) -> Translator:
    """Return the Translator of the checkpoint found.   replaced: settings, None for the checkpoint's"""
    state: Any = found.state
    program = state.get('program') if isinstance(state, dict) else None
    if program not in PROGRAMS:
        raise UserError(f'{found.path}: a checkpoint of {program}; expected one of {" or ".join(PROGRAMS)}')
    checkpoint.check_padding(found.path, state)
    settings = {'compute': 'float32'} | state['settings'] | {
        name: value for name, value in replaced.items() if value is not None}
    vocabularies = restore(state['vocabularies'])
    model = importlib.import_module(programs.module(f'{program}.translate')).build(settings, *map(len, vocabularies))
    rounding = model.config.ops.check() if settings.get('quant', 'none') != 'none' else None
    rounds, tensors = settings['compute'] != 'float32', found.tensors or {}
    checkpoint.restore(model.params, None, tensors, found.path, model.config.ops.names if rounds else ())
    if rounds:
        model.config.ops.pack(model.params, {name.removeprefix('parameter/'): tensor for name, tensor in tensors.items()})
    else:
        _pack(model)
    source, target = vocabularies
    return Translator(model, source, target, found.path, state, found.warnings, rounding)


def _pack(model: Any) -> None:
    """Pack the parameters of a model for the compute type float32; without effect if its layers read them unpacked."""
    if getattr(model.config.ops, 'is_compact', False) and not model.config.ops.rounds:
        model.config.ops.pack(model.params)


class _Waiting:
    """Texts that several workers take.   order: their numbers, the shortest first;  tokens: of each text"""

    def __init__(self, order: np.ndarray, tokens: np.ndarray) -> None:
        self._order, self._tokens, self._lock = order, tokens, threading.Lock()

    def take(self, most: int, tokens: float) -> list[int]:
        """Return the numbers of the longest texts, at most `most` with at most so many tokens: so workers end at about the
        same time."""
        with self._lock:
            count = int(np.searchsorted(np.cumsum(self._tokens[self._order[:-most - 1:-1]]), tokens, 'right'))
            self._order, taken = np.split(self._order, [len(self._order) - count])
            return taken.tolist()

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        with self._lock:
            self._order = self._order[:0]


class Translator:
    """A trained model with its two tokenizers.

    Several threads may call it; one at a time works on the device.  The model runs on the device that was current when this
    object was created.

    model               Seq2Seq or Transformer, with fixed weights: see reset()
    source_vocabulary, target_vocabulary    the tokenizers
    num_steps           the largest number of tokens of a text or a translation, end mark included
    path, state         of the checkpoint, None without one
    warnings            lines about other checkpoints in its folder that are damaged
    rounding            a line about the layers that round their operands (--quant), None without them
    about               an About of it
    """

    def __init__(self, model: Any, source_vocabulary: Tokenizer, target_vocabulary: Tokenizer, path: str | None = None,
                 state: dict[str, Any] | None = None, warnings: Sequence[str] = (), rounding: str | None = None) -> None:
        self.model, self.source_vocabulary, self.target_vocabulary = model, source_vocabulary, target_vocabulary
        self.path, self.state, self.warnings, self.rounding = path, state, tuple(warnings), rounding
        self.num_steps: int = model.config.num_steps
        kind = (state or {}).get('program', type(model).__name__.lower())
        self.about = About(kind, path, self.num_steps, rounding)
        self._device = backend.current_device()
        self._decoders: dict[Any, list[Decode]] = {}
        self._models = [model]                              # each for one batch at the same time, with the same weights

    def __repr__(self) -> str:
        sizes = f'{len(self.source_vocabulary)} and {len(self.target_vocabulary)} tokens'
        return f'Translator({type(self.model).__name__}, {sizes})'

    @overload
    def translate(          # type: ignore[overload-overlap]
            self, texts: str, beam: int = ..., nbest: Literal[1] = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> str: ...
    @overload
    def translate(          # type: ignore[overload-overlap]
            self, texts: Texts, beam: int = ..., nbest: Literal[1] = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> list[str]: ...
    @overload
    def translate(
            self, texts: Iterable[str], beam: int = ..., nbest: Literal[1] = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> Iterator[str]: ...
    @overload
    def translate(          # type: ignore[overload-overlap]
            self, texts: str, beam: int = ..., nbest: Many = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> list[str]: ...
    @overload
    def translate(          # type: ignore[overload-overlap]
            self, texts: Texts, beam: int = ..., nbest: Many = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> list[list[str]]: ...
    @overload
    def translate(
            self, texts: Iterable[str], beam: int = ..., nbest: Many = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> Iterator[list[str]]: ...
    @overload
    def translate(
            self, texts: Iterable[str], beam: int = ..., nbest: int = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., window: int | None = ...) -> Any: ...

    def translate(self, texts: Iterable[str], beam: int = BEAM, nbest: int = 1, length_penalty: float = LENGTH_PENALTY,
                  max_len: int | None = None, batch_size: int | None = None, window: int | None = None) -> Any:
        """Translate raw text by beam search (docs/beam_search.md).

        texts: a text -> its translation;  a list, another Sequence or an array -> the list of translations, in the same
               order;  another iterable, such as a generator or a file -> an iterator that reads `window` texts ahead
        nbest: if it is above 1, each result is a list of at most nbest translations, the best first
        beam=1: greedy decoding
        max_len: the largest number of tokens of a translation, end mark included; default and largest: num_steps
        batch_size: texts that are translated together, fewer if they are long; default: BATCH_ROWS hypotheses, so
                    BATCH_ROWS // beam texts, or fewer so that each worker has a batch
        window: texts that are read before the first of them is translated, and sorted by length; default: WINDOW batches
        A text without words has the translation ''; a longer text than the model reads is cut: see Translation.cut.
        On the CPU a text has the same translation in any batch, and batch_size has an effect on speed only.
        translations() also returns scores, tokens and alignments.
        UserError for a setting that is out of range, and for half of a surrogate pair in a text; TypeError for a text that is
        not a str, and for a setting of another type.
        """
        search, size = self.search(beam, nbest, length_penalty, max_len), texts_per_batch(batch_size, beam)

        def results(some: list[str]) -> list[Any]:
            outputs = [[self.target_vocabulary.decode(ids) for ids, _ in found.outputs] or ['']
                       for found in self._find(some, search, size, divide=batch_size is None)]
            return outputs if nbest > 1 else [best for best, *_ in outputs]
        return _map(results, texts, WINDOW * size if window is None else window)

    @overload
    def translations(          # type: ignore[overload-overlap]
            self, texts: str, beam: int = ..., nbest: int = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., alignments: bool = ...,
            scores: bool = ..., window: int | None = ...) -> list[Translation]: ...
    @overload
    def translations(          # type: ignore[overload-overlap]
            self, texts: Texts, beam: int = ..., nbest: int = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., alignments: bool = ...,
            scores: bool = ..., window: int | None = ...) -> list[list[Translation]]: ...
    @overload
    def translations(
            self, texts: Iterable[str], beam: int = ..., nbest: int = ..., length_penalty: float = ...,
            max_len: int | None = ..., batch_size: int | None = ..., alignments: bool = ...,
            scores: bool = ..., window: int | None = ...) -> Iterator[list[Translation]]: ...

    def translations(self, texts: Iterable[str], beam: int = BEAM, nbest: int = 1, length_penalty: float = LENGTH_PENALTY,
                     max_len: int | None = None, batch_size: int | None = None, alignments: bool = False,
                     scores: bool = True, window: int | None = None) -> Any:
        """Like translate(), but the result of each text is a list of at most nbest Translations, the best first.

        alignments: whether to compute Translation.alignment;  scores=False: with beam=1 it is faster, and the scores are None
        """
        search, size = self.search(beam, nbest, length_penalty, max_len), texts_per_batch(batch_size, beam)

        def results(some: list[str]) -> list[list[Translation]]:
            every = self._find(some, search, size, scores, batch_size is None)
            pairs = [(found.source, ids) for found in every for ids, _ in found.outputs]
            weights = self._align(pairs, size) if alignments else iter([None] * len(pairs))
            return [self._described(found, weights, alignments) for found in every]
        return _map(results, texts, WINDOW * size if window is None else window)

    @overload
    def score(          # type: ignore[overload-overlap]
            self, sources: str, targets: str, batch_size: int = ..., cut: bool = ...) -> float: ...
    @overload
    def score(self, sources: Texts, targets: Texts, batch_size: int = ..., cut: bool = ...) -> list[float]: ...

    def score(self, sources: Texts, targets: Texts, batch_size: int = BATCH_SIZE, cut: bool = False) -> float | list[float]:
        """Return the log probability of each target, given its source: the sum over its tokens, end mark included.

        sources, targets: lists of raw text of equal length, or a text each.  A source that is too long is cut, as in
                          translate().
        Divided by n ** length_penalty, n tokens, it is the score of a Translation with the same tokens.
        batch_size: pairs that are computed together
        cut: of a target with more than num_steps tokens, end mark included, score the first num_steps, without end mark
        UserError for a target that is too long, unless cut, and for a batch_size below 1; ValueError for lists of unequal
        length.
        """
        if isinstance(sources, str) and isinstance(targets, str):
            return self.score([sources], [targets], batch_size, cut)[0]
        for texts in sources, targets:
            _check_iterable(texts)
        if isinstance(sources, str) or isinstance(targets, str) or len(sources) != len(targets):
            raise ValueError('score: expected a text and its translation, or as many targets as sources')
        size = texts_per_batch(batch_size, 1)
        _, read, _ = self._read(self.source_vocabulary, sources)
        _, outputs, lengths = self._read(self.target_vocabulary, targets)
        long = np.flatnonzero(lengths >= self.num_steps)
        if len(long) and not cut:
            raise UserError(f'target {long[0]}: expected at most {self.num_steps} tokens, end mark included, got '
                            f'{lengths[long[0]] + 1}; shorten it, or give cut=True to score its first {self.num_steps}')
        pairs, scores = [(read[n], outputs[n]) for n in range(len(sources))], np.empty(len(sources))
        with _DEVICE, backend.on(self._device):
            for some, h, _, labels, starts in self._forced(pairs, size):
                for n, first, end in zip(some, starts[:-1], starts[1:], strict=True):
                    loss, ctx = self.model.output.forward(h[first:end], labels[first:end], gradients=False)
                    scores[n] = -float(backend.get(loss)[0]) * int(backend.get(ctx.valid)[0])
        return scores.tolist()

    def sentences(self, sources: Sequence[str], batch_size: int = 128, beam: int = 1,
                  length_penalty: float = LENGTH_PENALTY) -> list[str]:
        """Translate sentences, given and returned as in tokenizer.read_corpus(corpus)."""
        search = self.search(beam, 1, length_penalty)
        return [self.target_vocabulary.sentence(ids) for found in self._find(sources, search, batch_size)
                for ids, _ in found.outputs[:1] or [(np.empty(0, np.int32), None)]]

    def lengths(self, sentences: Sequence[str]) -> np.ndarray:
        """Return the number of tokens, without the end mark, of each sentence of the target language, (N,)."""
        return self.target_vocabulary.encode(sentences).lengths

    def reset(self) -> None:
        """Drop what was prepared from the weights.  Call it when the model's weights have changed."""
        with _DEVICE:
            self._decoders.clear()
            _pack(self.model)

    # ---- search --------------------------------------------------------------------------------------------------------

    def search(self, beam: int = BEAM, nbest: int = 1, length_penalty: float = LENGTH_PENALTY,
               max_len: int | None = None) -> Search:
        """Return the settings of a search.   UserError if one is out of range, TypeError if one has another type"""
        return self.about.search(beam, nbest, length_penalty, max_len)

    @staticmethod
    def _words(vocabulary: Tokenizer, texts: Texts) -> list[list[str]]:
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f'text {i}: expected str, got {type(text).__name__}')
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f'text {i}: character {error.start + 1} is half of a surrogate pair; '
                                'give valid Unicode, decoded from UTF-8 without surrogateescape') from None
        return [vocabulary.read(text) for text in texts]

    def _read(self, vocabulary: Tokenizer, texts: Texts) -> tuple[list[list[str]], Ragged, np.ndarray]:
        """Return the words of texts, their ids with <eos>, and their numbers of tokens without it before they were cut."""
        words = self._words(vocabulary, texts)
        encoded = vocabulary.encode(words)
        return words, Ragged.of(encoded, self.num_steps), encoded.lengths

    @property
    def joins(self) -> bool:
        """Whether texts of arriving() join those that are translated, when some of these have ended."""
        return self._joins and backend.threads() == 1

    def arriving(self, texts: Callable[[int], Sequence[str]], search: Search, batch_size: int,
                 alignments: bool = False) -> Iterator[list[tuple[int, list[Translation]]]]:
        """Translate texts that arrive while others are translated, at most batch_size at a time.

        texts(most) returns those that have arrived, at most so many.  If it returns none, and none is translated, that is the
        end.
        Yield after each step of the search the list of texts whose translations are complete: number in the order of arrival,
        result as in translations().
        `texts` must not wait for a text: until the end no other thread can translate.
        """
        arrived = 0
        if not self.joins or batch_size == 1:
            while some := texts(batch_size):
                found = self.translations(some, search.beam, search.nbest, search.length_penalty, search.max_len,
                                          alignments=alignments)
                yield list(enumerate(found, arrived))
                arrived += len(some)
            return
        waiting: deque[tuple[int, _Found]] = deque()
        searched: dict[int, tuple[int, _Found]] = {}            # by the number that the decoder gives
        ready: list[tuple[int, _Found]] = []                    # texts without words
        begun = 0

        def take(room: int, tokens: int) -> Sequences | None:
            nonlocal arrived, begun
            for found, length in zip(*self._begin(texts(max(0, room - len(waiting)))), strict=True):
                (waiting if length else ready).append((arrived, found))
                arrived += 1
            some: list[np.ndarray] = []
            while waiting and len(some) < room and (len(source := waiting[0][1].source) <= tokens or not searched):
                tokens -= len(source)
                some.append(source)
                searched[begun] = waiting.popleft()
                begun += 1
            return Sequences.of(some, self.num_steps) if some else None

        def described(done: Sequence[tuple[int, _Found]]) -> list[tuple[int, list[Translation]]]:
            pairs = [(found.source, ids) for _, found in done for ids, _ in found.outputs]
            weights = self._align(pairs, batch_size) if alignments else iter([None] * len(pairs))
            return [(number, self._described(found, weights, alignments)) for number, found in done]
        with _DEVICE, backend.on(self._device):
            decode, = self._decoder(search, True, 1)
            while (source := take(batch_size, _TOKENS)) or ready:
                for ended in decode(source, Supply(batch_size, _TOKENS, 1, take)) if source else ():
                    for number, outputs in ended:
                        ready.append(searched.pop(number))
                        ready[-1][1].outputs.extend(outputs)
                    yield described(ready)
                    ready.clear()
                if ready:
                    yield described(ready)
                    ready.clear()
                begun = 0

    def _begin(self, texts: Sequence[str]) -> tuple[list[_Found], np.ndarray]:
        """Return for each text a _Found without outputs; and the lengths, in tokens, before they were cut."""
        words, sources, lengths = self._read(self.source_vocabulary, texts)
        cut = np.maximum(lengths + 1 - self.num_steps, 0).tolist()
        return [_Found(words[n], sources[n], cut[n], []) for n in range(len(words))], lengths

    def _find(self, texts: Sequence[str], search: Search, batch_size: int, scores: bool = False,
              divide: bool = False) -> list[_Found]:
        """Search for the translations of texts.   divide: whether batches may be smaller, so that each worker has one

        Batches have sentences of about equal length, so that few of them wait for a longer one.
        """
        results, lengths = self._begin(texts)
        order = np.argsort(lengths, kind='stable')
        order = order[lengths[order] > 0]
        with _DEVICE, backend.on(self._device):
            workers, rows = self._workers(len(order), search), _rows(batch_size)
            is_host, joins = self._device.is_host, self._joins and rows > 1
            if divide and workers > 1:
                size = max(1, rows // _PARTS) if joins else rows
                parts = workers * -(-len(order) // (workers * size)) if joins else parts_of(len(order), workers, rows)
                first = part = max(1, min(size, -(-len(order) // parts)))
            else:
                first, part = rows, max(1, rows // _PARTS)
            workers = max(1, min(workers, -(-len(order) // first)))
            decoders = self._decoder(search, scores, workers)
            waiting, most = _Waiting(order, np.minimum(lengths + 1, self.num_steps)), _TOKENS if is_host else math.inf
            firsts = {decode: waiting.take(first, most) for decode in decoders}        # before anyone takes more

            def sequences(some: Sequence[int]) -> Sequences:
                return Sequences.of([results[n].source for n in some], self.num_steps)

            def more(taken: list[int], _: int, tokens: int) -> Sequences | None:
                new = waiting.take(part, tokens)
                taken.extend(new)
                return sequences(new) if new else None

            def work(decode: Decode) -> None:
                while some := firsts.pop(decode, None) or waiting.take(first, most):
                    taken = [*some]
                    filled: Any = some if is_host else np.resize(some, rows)
                    supply = Supply(rows, _TOKENS, part, partial(more, taken)) if joins and waiting else None
                    for ended in decode(sequences(filled), supply):
                        for k, outputs in ended:
                            if k < len(taken):
                                results[taken[k]].outputs.extend(outputs)
            _in_parallel(work, decoders, waiting)
        return results

    @property
    def _joins(self) -> bool:
        """Whether sentences can join a search."""
        return self._device.is_host and hasattr(self.model, 'reserve') and bool(self.model.free_rows)

    def _workers(self, texts: int, search: Search) -> int:
        """Return the number of batches to decode at the same time, each with its part of the threads.

        One product of many rows by two threads takes longer than two products by one thread each, and all else in a step
        has less work for a thread.  Not on a GPU, which computes one batch at a time.
        """
        if not self._device.is_host or not hasattr(self.model, 'twin'):
            return 1
        return max(1, min(WORKERS, backend.threads(), texts * search.beam // _WORKER_ROWS))

    def _decoder(self, search: Search, scores: bool, workers: int) -> list[Decode]:
        """Return for each worker decode(source, supply).

        Decoders of the last DECODERS searches are kept.  Their plans have memory for a number of threads, so it is in the key.
        """
        while len(self._models) < workers:
            self._models.append(self.model.twin())
        is_greedy = search.beam == 1 and not scores
        key = (search.max_len, 1) if is_greedy else search, workers, backend.threads()
        decoders = self._decoders.pop(key, None) or [self._make_decoder(model, search, is_greedy)
                                                     for model in self._models[:workers]]
        self._decoders[key] = decoders                      # the last one is the last used
        if len(self._decoders) > DECODERS:
            del self._decoders[next(iter(self._decoders))]
        return decoders

    @staticmethod
    def _make_decoder(model: Any, search: Search, is_greedy: bool) -> Decode:
        decoder = model.decoding(search.max_len) if is_greedy else BeamDecoder(model, search)

        def decode(source: Sequences, more: Supply | None) -> Iterator[list[tuple[int, Outputs]]]:
            for ended in decoder.stream(source, more):
                if is_greedy:
                    yield [(k, [(ids[ids != PAD], None)]) for k, ids in ended]
                else:
                    yield [(k, [(one.tokens[one.tokens != PAD], one.score) for one in found]) for k, found in ended]
        return decode

    def _described(self, found: _Found, weights: Iterator[np.ndarray | None], alignments: bool) -> list[Translation]:
        """Return the Translations of a text.   weights: the next ones belong to its outputs"""
        if not found.outputs:
            none = np.zeros((0, 0), 'f') if alignments and self.model.attends else None
            return [Translation('', 0.0, [], [], alignment=none)]
        source, target = self.source_vocabulary, self.target_vocabulary
        tokens = source.words(found.source)
        unknown = tuple(dict.fromkeys(source.unknown(found.words)))
        return [Translation(target.decode(ids), score, tokens, target.words(ids), found.cut, unknown, next(weights))
                for ids, score in found.outputs]

    # ---- given outputs -------------------------------------------------------------------------------------------------

    def _forced(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int, align: bool = False) -> Iterator[Any]:
        """Run the model on batches of given sources and outputs.   Yield the numbers of the pairs; h (N, D), and the weights of
        attention, of model.forced(); the labels, (N,); and the first label of each pair.  The caller holds _DEVICE."""
        sizes = np.array([(len(source), len(output)) for source, output in pairs]).reshape(-1, 2)
        order, done = np.argsort(sizes[:, 0], kind='stable'), 0
        while done < len(order):
            some = order[done:done + _rows(batch_size)]
            area = np.maximum.accumulate(sizes[some, 0]) * np.maximum.accumulate(sizes[some, 1]) * np.arange(1, len(some) + 1)
            some = some[:max(1, int(np.searchsorted(area, _WEIGHTS, 'right')))] if align else some
            done += len(some)
            longest = sizes[some].max(0).tolist()
            source = Sequences.of([pairs[n][0] for n in some], longest[0])
            outputs = [pairs[n][1] for n in some]
            target = Sequences.of([np.concatenate([[BOS], output[:-1]]) for output in outputs], longest[1])
            h, weights = self.model.forced(source, target, align)
            starts = np.concatenate([[0], np.cumsum(sizes[some, 1])]).tolist()
            yield some, h, weights, backend.put(np.concatenate(outputs).astype(np.int32)), starts

    def _align(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int) -> Iterator[np.ndarray | None]:
        """Return the alignments of given sources and outputs, in their order; Nones if the model has no attention."""
        results: list[np.ndarray | None] = [None] * len(pairs)
        with _DEVICE, backend.on(self._device):
            for some, _, weights, _, _ in self._forced(pairs, batch_size, True) if self.model.attends else ():
                for n, mean in zip(some, backend.get(weights).mean(1), strict=True):
                    results[n] = mean[:len(pairs[n][1]), :len(pairs[n][0])].copy()
        return iter(results)


def texts_per_batch(batch_size: int | None, beam: int) -> int:
    """Return batch_size, or its default for this beam.   UserError if it is below 1, TypeError if it is not a whole number"""
    if batch_size is None:
        return max(1, BATCH_ROWS // beam)
    check_whole('batch_size', batch_size)
    if batch_size < 1:
        raise UserError(f'batch_size: expected at least 1, got {batch_size}')
    return batch_size


def parts_of(texts: int, workers: int, size: int) -> int:
    """Return into how many parts of at most `size` texts are divided: as many for each worker.

    With several parts each, the shortest texts last, workers end at about the same time.
    """
    return workers * max(1, -(-texts // (workers * size)), min(_PARTS, texts // (workers * max(1, size // 5))))


def _rows(batch_size: int) -> int:
    """Return the number of sentences in a batch.  On a GPU every batch has the same, because 64 sentences take the time of one
    and a plan has been recorded.  There the last bits of a score may depend on the batch: products divide a sum
    according to the number of rows."""
    return batch_size if backend.current_device().is_host else _GPU_ROWS


def _in_parallel(work: Callable[[Decode], None], decoders: Sequence[Decode], waiting: _Waiting) -> None:
    """Run work(decoder) for each decoder, in a thread with its part of the threads of a kernel if there are several.

    waiting: emptied if one fails or the user interrupts, so that all end soon
    """
    if len(decoders) == 1:
        return work(decoders[0])
    from concurrent.futures import ThreadPoolExecutor  # the start of a program for one sentence does not need it
    threads = max(1, backend.threads() // len(decoders))
    with ThreadPoolExecutor(len(decoders), 'translator', backend.set_threads, (threads,)) as pool:
        try:
            for done in [pool.submit(work, decode) for decode in decoders]:
                done.result()
        finally:
            waiting.clear()
    return None


def _check_iterable(texts: Any) -> None:
    """TypeError for what are no texts, such as bytes, whose elements are numbers."""
    if isinstance(texts, bytes | bytearray) or not isinstance(texts, Iterable):
        raise TypeError(f'texts: expected a str or an iterable of them, got {type(texts).__name__}')


def _map(results: Callable[[list[str]], list[T]], texts: Iterable[str], window: int) -> T | list[T] | Iterator[T]:
    """Return results([text])[0] for a text, the list of all results for a Sequence or an array, else an iterator.

    window: texts that are passed to results() at once
    """
    check_whole('window', window)
    if window < 1:
        raise UserError(f'window: expected at least 1, got {window}')
    if isinstance(texts, str):
        return results([texts])[0]
    _check_iterable(texts)
    found = _windows(results, iter(texts), window)
    return list(found) if isinstance(texts, Sequence | np.ndarray) else found


def _windows(results: Callable[[list[str]], list[T]], texts: Iterator[str], size: int) -> Iterator[T]:
    while some := list(islice(texts, size)):
        yield from results(some)
