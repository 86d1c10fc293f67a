"""Counters of the server in the text format of Prometheus (version 0.0.4)."""
from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8'
_SECONDS = 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30
_TEXTS = 1, 2, 4, 8, 16, 32, 64, 128, 256


class Histogram:
    """The number of values up to each of `bounds`, their number and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, '+Inf'), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f'{name}_sum {self.sum:.6f}'
        yield f'{name}_count {total}'


class Metrics:
    """What the server has done since its start.  All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds, self._batches = Histogram(_SECONDS), Histogram(_TEXTS)
        self._texts = self._source_tokens = self._output_tokens = 0
        self._busy = 0.0

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or given up, with this status."""
        with self._lock:
            self._requests[route, status] += 1
            if route == '/translate':
                self._seconds.add(seconds)

    def done(self, together: int, texts: int, source_tokens: int, output_tokens: int, seconds: float) -> None:
        """Count texts that were translated together, `together` in all, of which `texts` are done."""
        with self._lock:
            self._batches.add(together)
            self._texts += texts
            self._source_tokens += source_tokens
            self._output_tokens += output_tokens
            self._busy += seconds

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Return all metrics as text.   gauges: {name: (help, present value)}"""
        return ''.join(f'{line}\n' for line in self._lines(gauges))

    def _lines(self, gauges: dict[str, tuple[str, float]]) -> Iterator[str]:
        with self._lock:
            yield from _head('pyops_requests_total', 'counter', 'HTTP requests by route and status')
            for (route, status), count in sorted(self._requests.items()):
                yield f'pyops_requests_total{{route="{route}",status="{status}"}} {count}'
            yield from _head('pyops_translate_seconds', 'histogram', 'time of a request of /translate')
            yield from self._seconds.lines('pyops_translate_seconds')
            yield from _head('pyops_batch_texts', 'histogram', 'texts that are translated together, when some are done')
            yield from self._batches.lines('pyops_batch_texts')
            for name, text, value in (('texts', 'texts translated', self._texts),
                                      ('source_tokens', 'tokens of the texts that were read', self._source_tokens),
                                      ('output_tokens', 'tokens of the best translations', self._output_tokens),
                                      ('busy_seconds', 'time in which the model translated', round(self._busy, 6))):
                yield from _head(f'pyops_{name}_total', 'counter', text)
                yield f'pyops_{name}_total {value}'
        for name, (text, present) in gauges.items():
            yield from _head(f'pyops_{name}', 'gauge', text)
            yield f'pyops_{name} {present}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f'# HELP {name} {text}'
    yield f'# TYPE {name} {kind}'
