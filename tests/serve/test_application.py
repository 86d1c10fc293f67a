"""The routes of the server, through a socket: the interface of /translate, its errors and limits, metrics, pages."""
import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from server import TEXTS, Held, ask, connect, model, post, read_all, request, running, until

from pyops.serve import api
from pyops.serve.api import Limits


@pytest.fixture(scope='module')
def server():
    with running(limits=Limits(body=20_000, texts=8, characters=100)) as server:
        yield server


# ---- translations ----------------------------------------------------------------------------------------------------

def test_an_answer_has_the_fields_of_the_interface(server):
    texts = ['I sleep now.', 'I qwerty.', '']
    status, answer = post(server.port, {'texts': texts, 'beam': 4, 'nbest': 2, 'length_penalty': 0.5, 'max_len': 8,
                                        'alignments': True})
    assert status == 200 and set(answer) == {'translations', 'model', 'milliseconds'} and answer['milliseconds'] > 0
    assert answer['model'] == {'kind': 'transformer', 'checkpoint': model().path.rpartition('/')[2]}
    wanted = model().translations(texts, 4, 2, 0.5, 8, alignments=True)
    assert [len(found) for found in answer['translations']] == [2, 2, 1]
    for got, want in zip(answer['translations'], wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            assert set(one) == {'text', 'score', 'source', 'tokens', 'unknown', 'cut', 'alignment'}
            assert all(one[name] == getattr(other, name) for name in ('text', 'source', 'tokens', 'cut'))
            assert one['score'] == pytest.approx(other.score, abs=1e-6) and one['unknown'] == list(other.unknown)
            assert len(one['alignment']) == len(one['tokens']) and all(
                len(row) == len(one['source']) and abs(sum(row) - 1) < 0.01 for row in one['alignment'])
    assert answer['translations'][1][0]['unknown'] == ['qwerty']


def test_a_single_text_has_the_defaults_of_the_command_line(server):
    status, answer = post(server.port, {'text': 'I sleep now.', 'max_len': None})
    ((found,),) = answer['translations']
    assert status == 200 and found['text'] == model().translate('I sleep now.') and 'alignment' not in found


def test_every_one_of_64_clients_gets_the_translations_of_its_texts():
    rng = random.Random(0)
    wanted = {settings: model().translate(TEXTS, *settings) for settings in ((5, 1), (2, 1), (1, 1))}
    with running() as server, ThreadPoolExecutor(64) as pool:
        def client(_):
            for _ in range(3):
                settings = rng.choice(list(wanted))
                chosen = [rng.randrange(len(TEXTS)) for _ in range(rng.randrange(1, 5))]
                status, answer = post(server.port, {'texts': [TEXTS[n] for n in chosen], 'beam': settings[0]})
                assert status == 200
                assert [best['text'] for best, *_ in answer['translations']] == [wanted[settings][n] for n in chosen]
            return True
        assert all(pool.map(client, range(64)))
        counters = ask(server.port, 'GET', '/metrics')[2].decode()
    batches = int(re.search(r'^pyops_batch_texts_count (\d+)$', counters, re.M)[1])
    assert batches < 64 * 3             # requests shared batches


# ---- errors ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('body, status, line', [
    (b'', 400, 'body: not valid JSON (Expecting value'), (b'{"text": "Go.', 400, 'body: not valid JSON (Unterminated string'),
    (b'{"text": "\xff"}', 400, 'body: not UTF-8 (byte 0xff at position 11); send JSON in UTF-8'),
    (b'\xef\xbb\xbf{}', 400, 'body: not valid JSON (Unexpected UTF-8 BOM'),
    (b'[' * 19_000, 400, 'body: nested too deeply; expected an object such as {"text": "Go now."}'),
    (b'{"text": "Go.", "length_penalty": NaN}', 400, 'body: not valid JSON (NaN is not a JSON value)'),
    (b'{"text": "Go.", "beam": ' + b'9' * 5000 + b'}', 400, 'body: not valid JSON (Exceeds the limit'),
    (b'{"text": "Go.", "beam": ' + b'9' * 4000 + b'}', 422, 'beam: expected 1 to 32, got 9999'),
    (b'[]', 422, 'body: expected an object such as {"text": "Go now."}, got []'),
    (b'{}', 422, 'expected either text or texts, such as {"text": "Go now."}'),
    (b'{"text": "a", "texts": []}', 422, 'expected either text or texts'),
    (b'{"text": "a", "bean": 5}', 422, '"bean": no such field; expected text, texts, beam, nbest, length_penalty, max_len'),
    (b'{"text": null}', 422, 'text: expected a string, got null'),
    (b'{"texts": "a"}', 422, 'texts: expected a list of strings'),
    (b'{"texts": ["a", 1]}', 422, 'texts[1]: expected a string, got 1'),
    (b'{"text": "a\\ud800"}', 422, 'text: character 2 is half of a surrogate pair; send valid Unicode'),
    (b'{"text": "a", "beam": true}', 422, 'beam: expected a whole number, got true'),
    (b'{"text": "a", "beam": 5.0}', 422, 'beam: expected a whole number, got 5.0'),
    (b'{"text": "a", "beam": 33}', 422, 'beam: expected 1 to 32, got 33'),
    (b'{"text": "a", "nbest": 6}', 422, 'nbest: expected 1 to the beam, 5, got 6'),
    (b'{"text": "a", "length_penalty": 1e400}', 422, 'length_penalty: expected a number from 0 to 100, got inf'),
    (b'{"text": "a", "length_penalty": "1"}', 422, 'length_penalty: expected a number, got "1"'),
    (b'{"text": "a", "max_len": 1000}', 422, 'max_len: expected 1 to 9, the length of sentences in training, got 1000'),
    (b'{"text": "a", "max_len": 0}', 422, 'max_len: expected at least 1, got 0'),
    (b'{"text": "a", "alignments": 1}', 422, 'alignments: expected true or false, got 1'),
    (json.dumps({'text': 'a' * 101}).encode(), 413, 'text: expected at most 100 characters, got 101; split the text'),
    (json.dumps({'texts': ['a'] * 9}).encode(), 413, 'texts: expected at most 8, got 9; send several requests'),
    (b' ' * 20_001, 413, 'body: expected at most 20000 bytes; send fewer texts at once')],
    ids=lambda value: str(value)[:40])
def test_wrong_input_is_refused_with_one_line(server, body, status, line):
    got, answer = post(server.port, body)
    assert got == status and set(answer) == {'error'} and answer['error'].startswith(line)
    assert '\n' not in answer['error'] and len(answer['error']) <= 300


def test_an_answer_that_could_have_too_many_weights_is_refused(server, monkeypatch):
    fields = {'texts': ['a' * 100, 'b'], 'nbest': 2, 'alignments': True}
    monkeypatch.setattr(api, 'MOST_WEIGHTS', (9 + 2) * 2 * 9 - 1)
    line = ('alignments: the answer could have 198 weights, expected at most 197; send fewer texts, or lower nbest or max_len')
    assert post(server.port, fields) == (413, {'error': line})
    assert post(server.port, fields | {'max_len': 8})[0] == post(server.port, fields | {'alignments': False})[0] == 200


def test_a_body_that_is_announced_as_too_large_is_not_asked_for(server):
    with connect(server.port) as client:
        client.sendall(b'POST /translate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n')
        assert read_all(client).startswith(b'HTTP/1.1 413 ')


@pytest.mark.parametrize('method, path, status, line', [
    ('GET', '/nowhere', 404, 'no such page; see /docs'), ('POST', '/translate/', 404, 'no such page; see /docs'),
    ('GET', '/translate', 405, 'GET: expected POST'),
    ('GET', '/static/..%2fapi.py', 404, 'no such page; see /docs'), ('GET', '/static/api.py', 404, 'no such file'),
    ('GET', '/static/%00', 404, 'no such file'), ('DELETE', '/health', 405, 'DELETE: expected ')])
def test_other_paths_and_methods_are_refused_in_json(server, method, path, status, line):
    got, headers, body = ask(server.port, method, path)
    assert got == status and json.loads(body)['error'].startswith(line) and headers['Content-Type'] == 'application/json'


def test_a_page_of_another_site_cannot_translate(server):
    assert post(server.port, {'text': 'Go.'}, Sec_Fetch_Site='cross-site')[0] == 403
    assert post(server.port, {'text': 'Go.'}, Sec_Fetch_Site='same-origin')[0] == 200


def test_a_token_is_required_for_translations_and_metrics_and_not_for_health():
    with running(token='secret') as server:
        for header in ({}, {'Authorization': 'Bearer wrong'}, {'Authorization': 'Basic secret'}, {'Authorization': 'Bearer'},
                       {'Authorization': 'Bearer s\xe9cret'}):
            status, headers, body = ask(server.port, 'POST', '/translate', b'{"text": "Go."}', **header)
            assert (status, headers['WWW-Authenticate']) == (401, 'Bearer') and 'Bearer TOKEN' in json.loads(body)['error']
            assert ask(server.port, 'GET', '/metrics', **header)[0] == 401
        assert post(server.port, {'text': 'Go.'}, Authorization='bearer secret')[0] == 200
        assert ask(server.port, 'GET', '/metrics', Authorization='Bearer secret')[0] == 200
        assert ask(server.port, 'GET', '/health')[0] == ask(server.port, 'GET', '/')[0] == 200


# ---- a model that takes its time -------------------------------------------------------------------------------------

@pytest.fixture
def held():
    return Held()


def test_a_full_queue_answers_429_at_once_and_goes_on_later(held):
    with running(held, queue=2) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server.port, {'text': TEXTS[0]})
        assert held.entered.wait(120)
        second = pool.submit(post, server.port, {'texts': TEXTS[1:3]})
        until(lambda: server.batcher.queued == 2)
        status, headers, body = ask(server.port, 'POST', '/translate', json.dumps({'text': 'Go.'}).encode())
        assert (status, headers['Retry-After']) == (429, '1') and 'the queue is full (2 texts)' in json.loads(body)['error']
        held.go.set()
        assert first.result(240)[0] == second.result(240)[0] == 200
        assert post(server.port, {'text': 'Go.'})[0] == 200


def test_a_request_that_takes_too_long_is_given_up_with_504_and_leaves_the_queue(held):
    with running(held, timeout=0.2) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server.port, {'text': TEXTS[0]})
        assert held.entered.wait(120)
        status, answer = post(server.port, {'texts': TEXTS[1:4]})
        assert (status, answer['error']) == (504, 'not translated within 0.2 seconds; send fewer texts or try again later')
        assert first.result(240)[0] == 504 and server.batcher.queued == 0
        held.go.set()
        until(lambda: post(server.port, {'text': 'Go.'})[0] == 200)
    assert not any(text in batch for batch in held.batches for text in TEXTS[1:4])


def test_a_client_that_disconnects_leaves_the_queue(held):
    with running(held) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server.port, {'text': TEXTS[0]})
        assert held.entered.wait(120)
        with connect(server.port) as client:
            client.sendall(request(json.dumps({'texts': TEXTS[1:4]}).encode()))
            until(lambda: server.batcher.queued == 3)
        until(lambda: server.batcher.queued == 0)
        held.go.set()
        assert first.result(240)[0] == 200
        assert 'route="/translate",status="499"} 1' in ask(server.port, 'GET', '/metrics')[2].decode()
    assert held.batches == [[TEXTS[0]]]


def test_a_request_on_which_the_model_fails_is_answered_with_500_and_the_next_one_is_translated(capfd):
    held = Held(fails=lambda texts: 'bad' in texts)
    held.go.set()
    with running(held) as server:
        status, answer = post(server.port, {'text': 'bad'})
        assert (status, answer['error']) == (500, 'the translation failed (RuntimeError); the log of the server has '
                                                  'the details')
        assert post(server.port, {'text': TEXTS[0]})[1]['translations'][0][0]['text'] == model().translate(TEXTS[0])
    assert 'RuntimeError: a bug in the model' in capfd.readouterr().err


def test_stopping_answers_the_accepted_requests_and_takes_no_new_connections(held):
    with running(held) as server, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, server.port, {'text': text}) for text in TEXTS[:2]]
        assert held.entered.wait(120)
        until(lambda: server.batcher.queued == 1 or len(held.batches[0]) == 2)
        server.server.should_exit = True

        def is_refused():
            with socket.socket() as client:
                return client.connect_ex(('127.0.0.1', server.port)) != 0
        until(is_refused)
        held.go.set()
        assert [answer.result(240)[1]['translations'][0][0]['text'] for answer in answers] == model().translate(TEXTS[:2])


# ---- other pages -----------------------------------------------------------------------------------------------------

def test_health_has_the_model_and_the_uptime(server):
    status, _, body = ask(server.port, 'GET', '/health')
    answer = json.loads(body)
    assert status == 200 and answer['ready'] is True and answer['model']['kind'] == 'transformer' and answer['uptime'] > 0


def test_health_is_503_when_the_queue_is_closed():
    with running() as server:
        server.batcher.close()
        assert json.loads(ask(server.port, 'GET', '/health')[2])['ready'] is False
        assert ask(server.port, 'GET', '/health')[0] == 503
        assert post(server.port, {'text': 'Go.'}) == (503, {'error': 'the server is shutting down'})


def test_metrics_count_requests_texts_and_tokens_in_the_format_of_prometheus():
    with running() as server:
        post(server.port, {'texts': TEXTS[:3]})
        post(server.port, b'{')
        ask(server.port, 'GET', '/some/path/of/a/client')
        _, headers, body = ask(server.port, 'GET', '/metrics')
    assert headers['Content-Type'] == 'text/plain; version=0.0.4; charset=utf-8'
    lines = body.decode().splitlines()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"\\]*"(,[a-z]+="[^"\\]*")*\})? [0-9.e+-]+')
    assert all(line.startswith(('# HELP ', '# TYPE ')) or sample.fullmatch(line) for line in lines)
    values = dict(line.rsplit(' ', 1) for line in lines if not line.startswith('#'))
    found = model().translations(TEXTS[:3])
    assert {'pyops_requests_total{route="/translate",status="200"}': '1',
            'pyops_requests_total{route="/translate",status="400"}': '1',
            'pyops_requests_total{route="other",status="404"}': '1', 'pyops_translate_seconds_count': '2',
            'pyops_translate_seconds_bucket{le="+Inf"}': '2', 'pyops_texts_total': '3',
            'pyops_source_tokens_total': str(sum(len(best.source) for best, in found)),
            'pyops_output_tokens_total': str(sum(len(best.tokens) for best, in found))}.items() <= values.items()
    assert values['pyops_batch_texts_bucket{le="4"}'] == values['pyops_batch_texts_count'] != '0'
    assert float(values['pyops_busy_seconds_total']) > 0


def test_the_description_has_the_limits_and_every_field_that_is_accepted(server):
    document = json.loads(ask(server.port, 'GET', '/openapi.json')[2])
    fields = document['paths']['/translate']['post']['requestBody']['content']['application/json']['schema']['properties']
    assert (fields['texts']['maxItems'], fields['text']['maxLength'], fields['max_len']['maximum']) == (8, 100, 9)
    defaults = {name: field['default'] for name, field in fields.items() if 'default' in field}
    assert post(server.port, {'text': 'Go.'} | defaults)[0] == 200 and set(fields) == {*defaults, 'text', 'texts'}
    _, answer = post(server.port, {'text': 'Go.', 'alignments': True})
    schema = document['paths']['/translate']['post']['responses']['200']['content']['application/json']['schema']
    assert set(schema['properties']) == set(answer)
    assert set(schema['properties']['translations']['items']['items']['properties']) == set(answer['translations'][0][0])
    page = ask(server.port, 'GET', '/docs')[2].decode()
    assert all(f'<code>{name}</code>' in page for name in fields) and '<script' not in page
    assert 'length_penalty' in page and not re.search(r'(src|href)="https?:', page)


def test_the_page_and_its_files_are_those_of_the_package(server):
    folder = ROOT / 'pyops/serve/page'
    status, headers, body = ask(server.port, 'GET', '/')
    assert (status, body) == (200, (folder / 'index.html').read_bytes())
    assert "default-src 'self'" in headers['Content-Security-Policy'] and headers['X-Content-Type-Options'] == 'nosniff'
    for path in folder.iterdir():
        status, headers, body = ask(server.port, 'GET', f'/static/{path.name}')
        assert (status, body) == (200, path.read_bytes())
    assert headers['Content-Type'].startswith(('text/', 'image/'))


def test_the_access_log_has_a_line_for_each_request(capfd):
    with running(quiet=False) as server:
        post(server.port, {'texts': TEXTS[:2]})
        with connect(server.port) as client:
            client.sendall(b'nonsense\r\n\r\n')
            read_all(client)
        ask(server.port, 'GET', '/%1b[31m')
        until(lambda: 'status="404"' in ask(server.port, 'GET', '/metrics')[2].decode())
    lines = [line for line in capfd.readouterr().err.splitlines() if '/metrics' not in line]
    stamp = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 127\.0\.0\.1 '
    assert [bool(re.fullmatch(stamp + end, line)) for end, line in zip((
        r'"POST /translate" 200 [\d.]+ ms 2 texts', '"-" 400 not an HTTP request with a head of up to 16384 bytes',
        r'"GET /%1b\[31m" 404 [\d.]+ ms'), lines, strict=True)] == [True] * 3, lines
    assert time.strftime('%Y', time.gmtime()) == lines[0][:4]
