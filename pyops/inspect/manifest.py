"""manifest.jsonl of a folder of saved tensors: its lines, read as they are written and checked."""
import functools
import os
import re
import stat

from pyops.inspect.checks import AXES_LIMIT, Refused, is_whole, parse_json, printable
from pyops.inspect.readers import SUFFIXES
from pyops.inspect.writer import MANIFEST, VERSION

_LINE_LIMIT = 64 << 20              # bytes; a writer stays far below, and what is longer would only fill our memory
_COMPLAINTS = 100                   # lines of one manifest that are named as bad

# {timestamp}_{counter}_{layer_type}_{operation}_{quant_type}_{tensor_name}; other programs have the phase and the component
# between operation and format (pre_FA) and come without a number of the layer
NAME = re.compile(r'(?:.*_)?(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{1,15})_'
                   r'(?P<layer_type>[A-Za-z]\w*?)(?:_L(?P<index>\d{1,9}))?_(?P<operation>forward|backward)'
                   r'(?:_(?:pre|post|unknown)_[A-Za-z]+)?_(?P<format>[A-Za-z0-9]+)_(?P<name>.+)', re.S)
_STATISTICS = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'


class Manifest:
    """manifest.jsonl, read as far as it is written; a half line at its end is left for the next time."""

    def __init__(self, path):
        self.path = path
        self.offset = self.lines = self.runs = self.bad = 0
        self.run, self.origins = {}, []
        self.batches = {}               # (run, step) -> the batch line
        self.refused = []               # (manifest.jsonl:line, reason)
        self._steps = []

    def origin(self, run):
        return self.origins[run] if run < len(self.origins) else 'pyops'

    def take_steps(self):
        steps, self._steps = self._steps, []
        return steps

    def read(self):
        """-> the tensor lines that were added, checked, as arguments of Entry."""
        try:
            if not stat.S_ISREG(os.lstat(self.path).st_mode):
                return self._refuse_file('not a plain file')
            with open(self.path, 'rb') as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0     # written anew
                file.seek(self.offset)
                return list(self._lines(file))
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._refuse_file(f'cannot be read ({error.strerror or error})')

    def _refuse_file(self, reason):
        if (MANIFEST, reason) not in self.refused:
            self.refused.append((MANIFEST, reason))
        return []

    def _lines(self, file):
        while line := file.readline(_LINE_LIMIT):
            if not line.endswith(b'\n'):
                if len(line) == _LINE_LIMIT:
                    self._refuse_file(f'a line of more than {_LINE_LIMIT >> 20} MiB; what comes after it is not read')
                return
            self.offset += len(line)
            self.lines += 1
            try:
                tensor = self._line(parse_json(line)) if line.strip() else None
                if tensor:
                    yield tensor
            except Refused as error:
                self.bad += 1
                if self.bad < _COMPLAINTS:
                    self.refused.append((f'{MANIFEST}:{self.lines}', str(error)))
                elif self.bad == _COMPLAINTS:
                    self.refused.append((f'{MANIFEST}:{self.lines}', 'more lines like those above; not listed'))

    def _line(self, line):
        kind = line.get('kind')
        if kind == 'run':
            self.runs += 1
            self.run = line
            self.origins.append(line['origin'] if line.get('origin') in ('pyops', 'torch') else 'file')
            if not isinstance(line.get('version'), int) or line['version'] > VERSION:
                raise Refused(f'a manifest of version {line.get("version")}: want {VERSION}, or a newer pyops')
        elif kind == 'tensor':
            return {**tensor_line(line), 'run': max(self.runs - 1, 0)}
        elif kind == 'batch':
            self.batches[max(self.runs - 1, 0), _whole(line, 'step')] = _batch_line(line)
        elif kind == 'step':
            self._steps.append({'step': _whole(line, 'step'), 'loss': _number(line, 'loss'), 'norm': _number(line, 'norm')})
        elif kind == 'lost':
            self.refused.append((_text(line, 'file'), f'lost when it was saved: {printable(_text(line, "reason"))}'))


def tensor_line(line):
    """The arguments of Entry that a tensor's line has, checked."""
    file = _text(line, 'file')
    if os.path.basename(file) != file or file in ('', '.', '..') or os.path.splitext(file)[1] not in SUFFIXES:
        raise Refused(f'names the file {file!r}: want {", ".join(SUFFIXES)} beside the manifest')
    shape = _items(line, 'shape', lambda size: is_whole(size))
    if len(shape) > AXES_LIMIT:
        raise Refused(f'shape has {len(shape)} axes')
    fmt, options = _text(line, 'format'), line.get('options') or {}
    known = isinstance(options, dict) and known_format(fmt, tuple(sorted((key, str(options[key])) for key in options)))
    if not known:
        raise Refused(f'format {printable(fmt)} with options {printable(options)}: there is no such format')
    time, axis, layer_type = line.get('time'), line.get('axis', -1), _text(line, 'layer_type')
    if time is not None and not is_whole(time):
        raise Refused(f'time is {printable(time)}')
    if axis != 'tokens' and not (isinstance(axis, int) and -len(shape) <= axis < max(len(shape), 1)):
        raise Refused(f'axis is {printable(axis)} of a tensor with {len(shape)} axes')
    if line.get('operation') not in ('forward', 'backward'):
        raise Refused(f'operation is {printable(line.get("operation"))}: want forward or backward')
    uses = _items(line, 'uses', lambda use: isinstance(use, dict), ())
    mask = _items(line, 'mask', lambda item: _is_mask(item, shape), ())
    match = NAME.fullmatch(os.path.splitext(file)[0])
    return {'file': file, 'counter': _whole(line, 'counter'), 'timestamp': match['timestamp'] if match else '',
            'layer': _text(line, 'layer'), 'layer_type': layer_type, 'index': _whole(line, 'index'),
            'operation': line['operation'], 'name': _text(line, 'name'), 'step': _whole(line, 'step'), 'time': time,
            'format': known, 'options': options, 'axis': axis, 'uses': tuple(uses), 'shape': tuple(shape),
            'dtype': _text(line, 'dtype', 'float32'), 'mask': tuple(mask), 'statistics': _statistics(line.get('statistics'))}


def _batch_line(line):
    """The lengths and words of a batch line, checked: of each side a list of numbers, a list of lists of text."""
    lengths, tokens = line.get('lengths') or {}, line.get('tokens') or {}
    if not isinstance(lengths, dict) or not all(_is_list(side, is_whole) for side in lengths.values()):
        raise Refused('lengths: want a list of numbers for each side')
    if not isinstance(tokens, dict) or not all(
            _is_list(side, lambda sentence: _is_list(sentence, lambda word: isinstance(word, str)))
            for side in tokens.values()):
        raise Refused('tokens: want a list of words for each sentence of each side')
    return {'lengths': lengths, 'tokens': tokens}


def _is_list(value, check):
    return isinstance(value, list) and all(check(item) for item in value)


def _is_mask(item, shape):
    if not isinstance(item, dict) or not isinstance(item.get('of'), str) or 'time' not in item:
        return False
    time, batch = item['time'], item.get('batch')
    return (time is None or is_whole(time) and time < len(shape)) and is_whole(batch) and batch < len(shape)


def _text(line, key, default=None):
    value = line.get(key, default)
    if not isinstance(value, str):
        raise Refused(f'{key} is {printable(value)}: want text')
    return value


def _whole(line, key):
    value = line.get(key)
    if not is_whole(value):
        raise Refused(f'{key} is {printable(value)}: want a whole number')
    return value


def _number(line, key):
    value = line.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _items(line, key, check, default=None):
    value = line.get(key, default)
    if value is default and default is not None:
        return default
    if not _is_list(value, check):
        raise Refused(f'{key} is {printable(value)[:80]}, which is not what a manifest has there')
    return value


def _statistics(values):
    """The statistics of a line, None where one is missing or no number."""
    if not isinstance(values, dict) or not all(key in values for key in _STATISTICS):
        return None
    return {key: values[key] if is_whole(values[key]) else _number(values, key) for key in _STATISTICS}


@functools.lru_cache(maxsize=256)
def known_format(name, options=()):
    """The name that formats.parse gives a format, or None where it knows none of that name with such options."""
    if name in ('fp32', 'float32', 'none'):
        return None if options else 'fp32'
    from pyops import formats
    try:
        return parse_format(name, dict(options)).name
    except formats.FormatError:
        return None


def parse_format(name, options):
    from pyops import formats
    return formats.parse(':'.join([name, *(f'{key}={value}' for key, value in options.items())]))
