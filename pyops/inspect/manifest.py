"""Reader of manifest.jsonl, the index of a folder of saved tensors.  Every line is checked before use."""
from __future__ import annotations

import functools
import os
import re
import stat
from typing import TYPE_CHECKING, Any, BinaryIO

from pyops.errors import printable
from pyops.inspect.checks import AXES_LIMIT, Refused, is_count, is_shape, parse_json
from pyops.inspect.readers import SUFFIXES
from pyops.inspect.writer import MANIFEST, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyops.formats import Format

_LINE_LIMIT = 64 << 20              # bytes; far more than any writer needs
_REPORT_LIMIT = 100                 # invalid lines reported per manifest

# {timestamp}_{counter}_{layer_type}_{operation}_{quant_type}_{tensor_name}; a fork of Megatron adds the iteration, the phase
# and the component (pre_FA), the rank, the sample and the group, and may omit the layer index
NAME = re.compile(r'(?:.*_)?(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{1,15})_(?:iter(?P<step>\d{1,9})_)?'
                  r'(?P<layer_type>[A-Za-z]\w*?)(?:_L(?P<index>\d{1,9}))?_(?P<operation>forward|backward)'
                  r'(?:_(?P<phase>pre|post|unknown)_(?P<component>[A-Za-z]+))?_(?P<format>[A-Za-z0-9]+)'
                  r'(?:_rank(?P<rank>\d{1,9}))?(?:_sample(?P<sample>\d{1,9}))?(?:_group(?P<group>\d{1,9}))?_(?P<name>.+)', re.S)
_STATISTICS = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'


class Manifest:
    """An incremental reader of one manifest.jsonl.  An incomplete last line is left for the next read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = self.lines = self.runs = self.bad = 0
        self.training = 0               # number of the current training, which a resumed run continues
        self._last_step, self._begins = -1, False
        self.run: dict[str, Any] = {}
        self.origins: list[str] = []
        self.batches: dict[tuple[int, int], dict[str, Any]] = {}    # (run, step) -> {'lengths': ..., 'tokens': ...}
        self.refused: list[tuple[str, str]] = []        # (manifest.jsonl:line number, reason)
        self._steps: list[dict[str, Any]] = []

    def origin(self, run: int) -> str:
        return self.origins[run] if run < len(self.origins) else 'pyops'

    def take_steps(self) -> list[dict[str, Any]]:
        steps, self._steps = self._steps, []
        return steps

    def read(self) -> list[dict[str, Any]]:
        """Return the tensor lines added since the last call, checked, as arguments of Entry."""
        try:
            if not stat.S_ISREG(os.lstat(self.path).st_mode):
                return self._refuse_file('not a regular file')
            with open(self.path, 'rb') as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0     # the file was replaced
                file.seek(self.offset)
                return list(self._lines(file))
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._refuse_file(f'cannot be read ({error.strerror or error})')

    def _refuse_file(self, reason: str) -> list[dict[str, Any]]:
        if (MANIFEST, reason) not in self.refused:
            self.refused.append((MANIFEST, reason))
        return []

    def _lines(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        while line := file.readline(_LINE_LIMIT):
            if not line.endswith(b'\n'):
                if len(line) == _LINE_LIMIT:
                    self._refuse_file(f'a line is longer than {_LINE_LIMIT >> 20} MiB; the rest of the file is not read')
                return
            self.offset += len(line)
            self.lines += 1
            try:
                tensor = self._line(parse_json(line)) if line.strip() else None
                if tensor:
                    yield tensor
            except Refused as error:
                self.bad += 1
                if self.bad < _REPORT_LIMIT:
                    self.refused.append((f'{MANIFEST}:{self.lines}', str(error)))
                elif self.bad == _REPORT_LIMIT:
                    self.refused.append((f'{MANIFEST}:{self.lines}', 'invalid; further invalid lines are not listed'))

    def _line(self, line: dict[str, Any]) -> dict[str, Any] | None:
        kind = line.get('kind')
        if kind == 'run':
            self.runs += 1
            self._begins = True
            self.run = line
            self.origins.append(line['origin'] if line.get('origin') in ('pyops', 'torch') else 'file')
            if not isinstance(line.get('version'), int) or line['version'] > VERSION:
                version = printable(line.get('version'))[:20]
                raise Refused(f'unsupported version {version}; expected at most {VERSION}; update pyops')
        elif kind == 'tensor':
            tensor = tensor_line(line)
            return {**tensor, 'run': max(self.runs - 1, 0), 'training': self._training_of(tensor['step'])}
        elif kind == 'batch':
            self.batches[max(self.runs - 1, 0), _count(line, 'step')] = _batch_line(line)
        elif kind == 'step':
            step = _count(line, 'step')
            self._steps.append({'step': step, 'loss': _number(line, 'loss'), 'norm': _number(line, 'norm'),
                                'training': self._training_of(step)})
        elif kind == 'lost':
            self.refused.append((_text(line, 'file'), f'could not be written: {printable(_text(line, "reason"))}'))
        return None

    def _training_of(self, step: int) -> int:
        """Return the number of the training to which a line belongs.  A run that begins after the last step continues it."""
        if self._begins:
            self._begins = False
            if step <= self._last_step:
                self.training, self._last_step = self.training + 1, -1
        self._last_step = max(self._last_step, step)
        return self.training


def tensor_line(line: dict[str, Any]) -> dict[str, Any]:
    """Check a manifest line of kind `tensor` and return the arguments of Entry that it contains."""
    file = _text(line, 'file')
    if os.path.basename(file) != file or file in ('', '.', '..') or os.path.splitext(file)[1] not in SUFFIXES:
        raise Refused(f'invalid file name {file!r}; expected a {", ".join(SUFFIXES)} file in the folder of the manifest')
    shape = _items(line, 'shape', lambda size: is_count(size))
    if not is_shape(shape):
        raise Refused(f'shape is {printable(shape)[:80]}; expected at most {AXES_LIMIT} axes and less than 2^63 bytes')
    fmt, options = _text(line, 'format'), line.get('options') or {}
    known = isinstance(options, dict) and known_format(fmt, tuple(sorted((key, str(options[key])) for key in options)))
    if not known:
        raise Refused(f'unknown format {printable(fmt)} with options {printable(options)}')
    time, axis, layer_type = line.get('time'), line.get('axis', -1), _text(line, 'layer_type')
    if time is not None and not is_count(time):
        raise Refused(f'time is {printable(time)}; expected null or a non-negative integer')
    if axis != 'tokens' and not (isinstance(axis, int) and -max(len(shape), 1) <= axis < max(len(shape), 1)):
        raise Refused(f'axis is {printable(axis)}, but the tensor has {len(shape)} axes')
    if line.get('operation') not in ('forward', 'backward'):
        raise Refused(f'operation is {printable(line.get("operation"))}; expected forward or backward')
    uses = _items(line, 'uses', lambda use: isinstance(use, dict), ())
    mask = _items(line, 'mask', lambda item: _is_mask(item, shape), ())
    match = NAME.fullmatch(os.path.splitext(file)[0])
    return {'file': file, 'counter': _count(line, 'counter'), 'timestamp': match['timestamp'] if match else '',
            'layer': _text(line, 'layer'), 'layer_type': layer_type, 'index': _count(line, 'index'),
            'operation': line['operation'], 'name': _text(line, 'name'), 'step': _count(line, 'step'), 'time': time,
            'format': known, 'options': options, 'axis': axis, 'uses': tuple(uses), 'shape': tuple(shape),
            'dtype': _text(line, 'dtype', 'float32'), 'mask': tuple(mask), 'statistics': _statistics(line.get('statistics'))}


def _batch_line(line: dict[str, Any]) -> dict[str, Any]:
    """Check a batch line and return its lengths, {side: [int]}, and tokens, {side: [[str]]}."""
    lengths, tokens = line.get('lengths') or {}, line.get('tokens') or {}
    if not isinstance(lengths, dict) or not all(_is_list(side, is_count) for side in lengths.values()):
        raise Refused('invalid lengths; expected a list of integers per side')
    if not isinstance(tokens, dict) or not all(
            _is_list(side, lambda sentence: _is_list(sentence, lambda word: isinstance(word, str)))
            for side in tokens.values()):
        raise Refused('invalid tokens; expected a list of words per sentence and side')
    return {'lengths': lengths, 'tokens': tokens}


def _is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(check(item) for item in value)


def _is_mask(item: Any, shape: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get('of'), str) or 'time' not in item:
        return False
    time, batch = item['time'], item.get('batch')
    return (time is None or is_count(time) and time < len(shape)) and is_count(batch) and batch < len(shape)


def _text(line: dict[str, Any], key: str, default: str | None = None) -> str:
    value = line.get(key, default)
    if not isinstance(value, str):
        raise Refused(f'{key} is {printable(value)}; expected a string')
    return value


def _count(line: dict[str, Any], key: str) -> int:
    value = line.get(key)
    if not is_count(value):
        raise Refused(f'{key} is {printable(value)}; expected a non-negative integer')
    return value


def _number(line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _items(line: dict[str, Any], key: str, check: Callable[[Any], bool], default: Any = None) -> Any:
    value = line.get(key, default)
    if value is default and default is not None:
        return default
    if not _is_list(value, check):
        raise Refused(f'invalid value of {key}: {printable(value)[:80]}')
    return value


def _statistics(values: Any) -> dict[str, Any] | None:
    """Return the statistics of a line, or None if one is missing."""
    if not isinstance(values, dict) or not all(key in values for key in _STATISTICS):
        return None
    return {key: values[key] if is_count(values[key]) else _number(values, key) for key in _STATISTICS}


@functools.lru_cache(maxsize=256)
def known_format(name: str, options: tuple[tuple[str, str], ...] = ()) -> str | None:
    """Return the canonical name of a number format, or None if formats.parse rejects the name or an option."""
    if name in ('fp32', 'float32', 'none'):
        return None if options else 'fp32'
    from pyops import formats
    try:
        return parse_format(name, dict(options)).name
    except formats.FormatError:
        return None


def parse_format(name: str, options: Mapping[str, Any]) -> Format:
    from pyops import formats
    return formats.parse(':'.join([name, *(f'{key}={value}' for key, value in options.items())]))
