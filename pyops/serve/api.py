"""Requests and answers of /translate as JSON."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from pyops.errors import UserError, printable
from pyops.text.decoding import Search
from pyops.text.flags import BEAM, LENGTH_PENALTY
from pyops.text.serving import output_fields
from pyops.text.translator import Translation

EXAMPLE = '{"text": "Go now."}'
_FIELDS = 'text', 'texts', 'beam', 'nbest', 'length_penalty', 'max_len', 'alignments'
MOST_WEIGHTS = 4_000_000        # of an answer with alignments: 30 MB
_SHOWN = 40             # characters of a wrong value in a message
_LONGEST = 300          # characters of a message


class Limits(NamedTuple):
    """The largest request: bytes of its body, its texts, characters of a text."""
    body: int = 1 << 20
    texts: int = 128
    characters: int = 5000


class Refused(Exception):
    """A request that is not answered: the HTTP status, one line for the client, and headers."""

    def __init__(self, status: int, line: str, **headers: str) -> None:
        super().__init__(status, line)
        self.status, self.line = status, printable(' '.join(line.split()))[:_LONGEST]
        self.headers = {name.replace('_', '-'): value for name, value in headers.items()}


class Wanted(NamedTuple):
    """A valid request."""
    texts: list[str]
    search: Search
    alignments: bool


def parse(body: bytes, limits: Limits, check: Callable[[int, int, float, int | None], Search]) -> Wanted:
    """Return the request in a body.

    check(beam, nbest, length_penalty, max_len) returns the Search, or raises UserError
    Refused: 400 if the body is not JSON, 422 for wrong fields, 413 for too many or too long texts
    """
    fields = _object(body)
    for name in fields:
        if name not in _FIELDS:
            raise Refused(422, f'{_shown(name)}: no such field; expected {", ".join(_FIELDS)}')
    if ('text' in fields) == ('texts' in fields):
        raise Refused(422, f'expected either text or texts, such as {EXAMPLE}')
    texts = [fields['text']] if 'text' in fields else fields['texts']
    if not isinstance(texts, list):
        raise Refused(422, f'texts: expected a list of strings, got {_shown(texts)}')
    if len(texts) > limits.texts:
        raise Refused(413, f'texts: expected at most {limits.texts}, got {len(texts)}; send several requests')
    for number, text in enumerate(texts):
        _check_text('text' if 'text' in fields else f'texts[{number}]', text, limits.characters)
    penalty, alignments = fields.get('length_penalty', LENGTH_PENALTY), fields.get('alignments', False)
    if isinstance(penalty, bool) or not isinstance(penalty, int | float):
        raise Refused(422, f'length_penalty: expected a number, got {_shown(penalty)}')
    if not isinstance(alignments, bool):
        raise Refused(422, f'alignments: expected true or false, got {_shown(alignments)}')
    beam, nbest = _count('beam', fields.get('beam', BEAM)), _count('nbest', fields.get('nbest', 1))
    max_len = fields.get('max_len')
    try:
        search = check(beam, nbest, penalty, None if max_len is None else _count('max_len', max_len))
    except UserError as error:
        raise Refused(422, str(error)) from error
    return Wanted(texts, search, alignments)


def _object(body: bytes) -> dict[str, Any]:
    def constant(name: str) -> NoReturn:
        raise ValueError(f'{name} is not a JSON value')
    try:
        fields = json.loads(body.decode(), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise Refused(400, f'body: not UTF-8 (byte 0x{body[error.start]:02x} at position {error.start + 1}); '
                      'send JSON in UTF-8') from error
    except RecursionError as error:
        raise Refused(400, f'body: nested too deeply; expected an object such as {EXAMPLE}') from error
    except ValueError as error:
        raise Refused(400, f'body: not valid JSON ({error}); expected an object such as {EXAMPLE}') from error
    if not isinstance(fields, dict):
        raise Refused(422, f'body: expected an object such as {EXAMPLE}, got {_shown(fields)}')
    return fields


def _check_text(name: str, text: Any, most: int) -> None:
    if not isinstance(text, str):
        raise Refused(422, f'{name}: expected a string, got {_shown(text)}')
    if len(text) > most:
        raise Refused(413, f'{name}: expected at most {most} characters, got {len(text)}; split the text into sentences')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(422, f'{name}: character {error.start + 1} is half of a surrogate pair; send valid Unicode') from error


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(422, f'{name}: expected a whole number, got {_shown(value)}')
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + '...'


def check_size(wanted: Wanted, num_steps: int) -> None:
    """Refused: 413 if the alignments of an answer could have more than MOST_WEIGHTS elements.   num_steps: of the model"""
    if not wanted.alignments:
        return
    sources = sum(min(len(text) + 1, num_steps) for text in wanted.texts)
    weights = sources * wanted.search.nbest * wanted.search.max_len
    if weights > MOST_WEIGHTS:
        raise Refused(413, f'alignments: the answer could have {weights} weights, expected at most {MOST_WEIGHTS}; send fewer '
                      'texts, or lower nbest or max_len')


def encoded(translations: list[Translation]) -> str:
    """Return the translations of a text as JSON."""
    return json.dumps([_fields_of(translation) for translation in translations], allow_nan=False)


def answer(translations: list[str], model: dict[str, str], seconds: float) -> str:
    """Return an answer as JSON.   translations: a list for each text, as JSON"""
    rest = json.dumps({'model': model, 'milliseconds': round(1e3 * seconds, 3)})
    return f'{{"translations": [{", ".join(translations)}], {rest[1:]}'


def _fields_of(translation: Translation) -> dict[str, Any]:
    return output_fields(translation) | {'source': translation.source, 'unknown': list(translation.unknown),
                                         'cut': translation.cut}
