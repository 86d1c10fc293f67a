"""The description of the routes: an OpenAPI document, and the page /docs, which shows it without scripts."""
from __future__ import annotations

import json
from html import escape
from typing import Any

from pyops import __version__
from pyops.serve.api import Limits
from pyops.text.flags import BEAM, LARGEST_BEAM, LARGEST_PENALTY, LENGTH_PENALTY

_ERRORS = {400: 'the body is not JSON in UTF-8', 401: 'the token is missing or wrong', 403: 'sent by a page of another site',
           408: 'the request did not arrive in time',
           413: 'the body, a text, the number of texts, or an answer with alignments is too large',
           422: 'a field is wrong', 429: 'the queue is full; try again after Retry-After seconds',
           500: 'the translation failed', 503: 'the server is shutting down, or has too many connections',
           504: 'the translation took too long'}


def document(limits: Limits, num_steps: int, has_token: bool) -> dict[str, Any]:
    """Return the OpenAPI document.   num_steps: the largest max_len"""
    text = {'type': 'string', 'maxLength': limits.characters}
    request = _object({
        'text': text | {'description': 'a text; either text or texts is required'},
        'texts': {'type': 'array', 'items': text, 'maxItems': limits.texts, 'description': 'several texts'},
        'beam': {'type': 'integer', 'minimum': 1, 'maximum': LARGEST_BEAM, 'default': BEAM,
                 'description': 'hypotheses of the search; 1: greedy decoding'},
        'nbest': {'type': 'integer', 'minimum': 1, 'maximum': LARGEST_BEAM, 'default': 1,
                  'description': 'translations of each text, at most beam'},
        'length_penalty': {'type': 'number', 'minimum': 0, 'maximum': LARGEST_PENALTY, 'default': LENGTH_PENALTY,
                           'description': 'the log probability is divided by the length to this power'},
        'max_len': {'type': ['integer', 'null'], 'minimum': 1, 'maximum': num_steps, 'default': None,
                    'description': f'largest number of tokens of a translation; null: {num_steps}'},
        'alignments': {'type': 'boolean', 'default': False, 'description': 'whether translations have an alignment'}})
    request['additionalProperties'] = False
    strings = {'type': 'array', 'items': {'type': 'string'}}
    translation = _object({
        'text': {'type': 'string', 'description': 'the translation'},
        'score': {'type': ['number', 'null'], 'description': 'log probability, divided by length ** length_penalty'},
        'source': strings | {'description': 'the tokens that the model read, end mark included'},
        'tokens': strings | {'description': 'the tokens of the translation'},
        'unknown': strings | {'description': 'words that the vocabulary lacks'},
        'cut': {'type': 'integer', 'description': 'tokens at the end of the text that were not read'},
        'alignment': {'type': 'array', 'items': {'type': 'array', 'items': {'type': 'number'}},
                      'description': 'attention to the source, a row for each token; absent without alignments, and if the '
                                     'model has no attention'}},
        'text', 'score', 'source', 'tokens', 'unknown', 'cut')
    model = _object({'kind': {'type': 'string'}, 'checkpoint': {'type': 'string'}}, 'kind', 'checkpoint')
    answer = _object({
        'translations': {'type': 'array', 'items': {'type': 'array', 'items': translation},
                         'description': 'for each text, in the order of the request, its translations, the best first'},
        'model': model,
        'milliseconds': {'type': 'number', 'description': 'from the head of the request to the answer'}},
        'translations', 'model', 'milliseconds')
    error = _object({'error': {'type': 'string', 'description': 'one line'}}, 'error')
    health = _object({'ready': {'type': 'boolean'}, 'model': model,
                      'uptime': {'type': 'number', 'description': 'seconds'}}, 'ready', 'model', 'uptime')
    secured: dict[str, Any] = {'security': [{'token': []}]} if has_token else {}
    errors = {str(status): {'description': line, 'content': _json(error)} for status, line in _ERRORS.items()}
    result: dict[str, Any] = {
        'openapi': '3.1.0',
        'info': {'title': 'pyops translations', 'version': __version__,
                 'description': f'Every error is an object with one line, error. A body has at most {limits.body} bytes.'},
        'paths': {
            '/translate': {'post': {
                'summary': 'Translate texts', 'requestBody': {'required': True, 'content': _json(request)},
                'responses': {'200': {'description': 'the translations', 'content': _json(answer)}} | errors} | secured},
            '/health': {'get': {
                'summary': 'Whether the server takes requests',
                'responses': {'200': {'description': 'it does', 'content': _json(health)},
                              '503': {'description': 'it is shutting down', 'content': _json(health)}}}},
            '/metrics': {'get': {
                'summary': 'Counters in the text format of Prometheus',
                'responses': {'200': {'description': 'the counters', 'content': {'text/plain': {}}}}} | secured},
            '/openapi.json': {'get': {'summary': 'This description', 'responses': {
                '200': {'description': 'an OpenAPI document', 'content': _json({'type': 'object'})}}}}}}
    if has_token:
        result['components'] = {'securitySchemes': {'token': {'type': 'http', 'scheme': 'bearer'}}}
    return result


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {'type': 'object', 'properties': properties} | ({'required': list(required)} if required else {})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {'application/json': {'schema': schema}}


# ---- the page --------------------------------------------------------------------------------------------------------

_STYLE = ('body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}'
          'table{border-collapse:collapse}td,th{border:1px solid #8884;padding:.2em .6em;text-align:left}'
          'pre{background:#8882;padding:1em;overflow:auto}:root{color-scheme:light dark}')


def page(document: dict[str, Any]) -> str:
    """Return the HTML of an OpenAPI document."""
    info = document['info']
    parts = ['<!doctype html><html lang="en"><head><meta charset="utf-8">'
             '<meta name="viewport" content="width=device-width">'
             f'<title>{escape(info["title"])}</title><style>{_STYLE}</style></head><body>',
             f'<h1>{escape(info["title"])}</h1><p>{escape(info["description"])} '
             'The same as JSON: <a href="openapi.json">openapi.json</a>.</p>']
    for path, methods in document['paths'].items():
        for method, operation in methods.items():
            parts.append(f'<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation["summary"])}'
                         f'{"; requires a bearer token" if "security" in operation else ""}.</p>')
            if 'requestBody' in operation:
                parts.append('<h3>Request</h3>' + _table(_schema(operation['requestBody'])))
                parts.append("<pre>curl -s -H 'Content-Type: application/json' -d '{\"texts\": [\"Go now.\"]}' "
                             'http://127.0.0.1:8000/translate</pre>')
            for status, answer in operation['responses'].items():
                schema = _schema(answer)
                parts.append(f'<h3>{status}</h3><p>{escape(answer["description"])}</p>')
                if status == '200' and 'properties' in schema:
                    parts.append(_table(schema))
    return '\n'.join([*parts, '</body></html>'])


def _schema(part: dict[str, Any]) -> dict[str, Any]:
    return part.get('content', {}).get('application/json', {}).get('schema', {})


def _table(schema: dict[str, Any], prefix: str = '') -> str:
    return ('<table><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>' + ''.join(_rows(schema, prefix))
            + '</table>')


def _rows(schema: dict[str, Any], prefix: str) -> Any:
    for name, field in schema['properties'].items():
        kind = field['type'] if isinstance(field['type'], str) else ' or '.join(field['type'])
        bounds = [f'{word} {field[key]}' for key, word in (('minimum', 'from'), ('maximum', 'to'), ('maxItems', 'at most'),
                                                           ('maxLength', 'at most')) if key in field]
        default = json.dumps(field['default']) if 'default' in field else ''
        yield (f'<tr><td><code>{escape(prefix + name)}</code></td><td>{escape(" ".join([kind, *bounds]))}</td>'
               f'<td>{default}</td><td>{escape(field.get("description", ""))}</td></tr>')
        inner = field
        while inner.get('type') == 'array':
            inner, name = inner['items'], name + '[]'
        if 'properties' in inner:
            yield from _rows(inner, f'{prefix}{name}.')
