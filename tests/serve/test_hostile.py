"""Clients that break the protocol, stall or flood: each is refused or closed, and another client is not disturbed."""
import contextlib
import json
import random
import re
import socket
import threading

import pytest
from server import TEXTS, Held, ask, connect, model, post, read_all, request, running, until

from pyops.serve.api import Limits
from pyops.serve.connections import Timing

READ = 0.4              # seconds
BODY = json.dumps({'text': 'Go.'}).encode()
CHUNKED = b'POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n'


@pytest.fixture(scope='module')
def server():
    with running(limits=Limits(body=100_000), read_timeout=READ, timing=Timing(READ, 1.0, 5.0, 64)) as server:
        yield server


@pytest.fixture(autouse=True)
def normal_client(server):
    """Another client translates during each test, and gets every answer."""
    done, wrong, wanted = threading.Event(), [], model().translate(TEXTS[:20])

    def translate():
        n = 0
        while not done.is_set() or n < 2:
            try:
                status, answer = post(server.port, {'text': TEXTS[n % 20]})
                if status != 200 or answer['translations'][0][0]['text'] != wanted[n % 20]:
                    wrong.append((status, answer))
            except Exception as error:
                wrong.append(error)
            n += 1
    thread = threading.Thread(target=translate)
    thread.start()
    yield
    done.set()
    thread.join(240)
    assert not thread.is_alive() and wrong == []
    until(lambda: not server.server.server_state.connections)       # nothing hostile is left


def answer_to(port, *parts):
    """Send bytes, and return all that the server sends until it closes the connection."""
    with connect(port) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
        return read_all(client)


def is_refused(answer):
    """Whether an answer is an error of the client, with a line of JSON; or nothing, if the connection was reset."""
    head, _, body = answer.partition(b'\r\n\r\n')
    return not answer or re.match(rb'HTTP/1\.1 4\d\d ', head) and set(json.loads(body)) == {'error'}


@pytest.mark.parametrize('data', [
    b'A' * 1_000_000, b'GET /' + b'a' * 1_000_000 + b' HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: x\r\nX: ' + b'b' * 1_000_000 + b'\r\n\r\n',
    b'GET / HTTP/1.1\r\n' + b'X: y\r\n' * 10_000 + b'\r\n', b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + b'\0' * 100,
    b'\xff\xfe\x00\r\n\r\n', b'GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n', b'GET / HTTP/1.1\r\n\r\n',
    b'POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n',
    b'POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde',
    b'POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: ' + b'9' * 30 + b'\r\nExpect: 100-continue\r\n\r\n',
    CHUNKED + b'zz\r\n',
    b'POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n'], ids=lambda data: repr(data[:45]))
def test_what_is_no_request_is_refused(server, data):
    assert is_refused(answer_to(server.port, data))


@pytest.mark.parametrize('body', [b'\xff\xfe\xfd', b'{"text": "\xed\xa0\x80"}', b'{"text": "Go.', b'nonsense', b'"' * 50_000,
                                  b'{"a":' * 15_000, b'\0' * 1000])
def test_a_body_that_is_no_json_is_refused(server, body):
    answer = answer_to(server.port, request(body, 'Connection: close'))
    assert answer.startswith(b'HTTP/1.1 400 ') and is_refused(answer)


def test_random_bytes_are_refused(server):
    rng = random.Random(0)
    good = request(BODY, 'Connection: close')
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        answer = answer_to(server.port, bytes(data))        # one that waits for more is closed after READ seconds
        assert not answer or re.match(rb'HTTP/1\.1 [24]\d\d ', answer), answer


def test_a_body_of_50_megabytes_is_refused_and_not_stored(server):
    answer = answer_to(server.port, b'POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n',
                       *[b'a' * 500_000] * 100)
    assert is_refused(answer)
    chunk = b'186a0\r\n' + b'a' * 100_000 + b'\r\n'
    answer = answer_to(server.port, CHUNKED, *[chunk] * 100)
    assert is_refused(answer)


@pytest.mark.parametrize('sent', [b'', b'POST /translate HT', b'POST /translate HTTP/1.1\r\nHost: x\r\n'], ids=repr)
def test_a_head_that_does_not_arrive_in_time_is_refused_with_408(server, sent):
    answer = answer_to(server.port, sent)
    assert answer.startswith(b'HTTP/1.1 408 ') and is_refused(answer)


def trickle(port, head, filler):
    """Send a byte now and then, which resets any timer of an idle connection.   Return the answer"""
    with connect(port) as client:
        client.sendall(head)
        client.settimeout(0.05)
        data = b''
        for _ in range(400):
            try:
                client.sendall(filler)
                part = client.recv(1 << 16)
                if not part:
                    return data
                data += part
            except TimeoutError:
                pass
            except ConnectionError:
                return data
    raise AssertionError('the server never closed the connection')


@pytest.mark.parametrize('head, filler', [
    (b'GET / HTTP/1.1\r\n', b'X: y\r\n'), (request(b'x' * 1000)[:-1000], b'x'),
    (CHUNKED, b'1\r\nx\r\n')], ids=['head', 'body', 'chunks'])
def test_a_client_that_sends_a_byte_now_and_then_is_refused_with_408(server, head, filler):
    assert trickle(server.port, head, filler).startswith(b'HTTP/1.1 408 ')


def test_the_rest_of_a_body_that_was_refused_must_arrive_in_time_too(server):
    answer = trickle(server.port, request(b'x' * 1000, path='/nowhere')[:-1000], b'x')
    assert answer.startswith(b'HTTP/1.1 404 ')


def test_an_idle_connection_is_closed_after_an_answer(server):
    with connect(server.port) as client:
        client.sendall(b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
        assert read_all(client).startswith(b'HTTP/1.1 200 ')


def test_half_closed_sockets_are_closed(server):
    for data in b'', b'POST /transl', request(BODY)[:-3], request(BODY):
        with connect(server.port) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            read_all(client)


def test_a_client_that_does_not_read_its_answer_is_closed():
    """Its answers are larger than the buffers of its socket."""
    with running(timing=Timing(read=READ, shutdown=5)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(('127.0.0.1', server.port))
        body = json.dumps({'texts': [' '.join(TEXTS[:8])] * 100, 'beam': 8, 'nbest': 8, 'alignments': True}).encode()
        client.settimeout(60)
        with contextlib.suppress(ConnectionError):
            client.sendall(request(body) * 30)
        until(lambda: server.server.server_state.connections)
        until(lambda: not server.server.server_state.connections)
        assert post(server.port, {'text': 'Go.'})[0] == 200


def test_requests_in_one_packet_are_answered_in_order(server):
    texts = TEXTS[:5]
    data = b''.join(request(json.dumps({'text': text}).encode()) for text in texts)
    answer = answer_to(server.port, data + b'GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n')
    lines = re.findall(rb'\{"translations.*?"milliseconds": [\d.]+}', answer)
    found = [json.loads(line)['translations'][0][0]['text'] for line in lines]
    assert found == model().translate(texts) and answer.count(b'HTTP/1.1 200') == 6


def test_stalled_connections_make_room_for_others_the_one_that_waits_longest_first():
    """Their time is not up: as many as the server takes wait for the rest of a head or a body, or between two requests."""
    with running(timing=Timing(connections=6, shutdown=5)) as server:
        sent = [b'', b'GET / HTTP/1.1\r\n', request(BODY)[:-3], b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n', CHUNKED, b'GET /']
        clients = []
        for number, data in enumerate(sent, 1):
            clients.append(connect(server.port))
            clients[-1].sendall(data)
            if number == 4:
                answer = b''
                while not answer.endswith(b'}'):                # then it may send another request
                    answer += clients[-1].recv(1 << 16)
            until(lambda n=number: len(server.server.server_state.connections) == n)
        for number, client in enumerate(clients[:6]):
            assert post(server.port, {'text': 'Go.'})[0] == 200
            until(lambda: len(server.server.server_state.connections) == 5)
            answer = read_all(client)
            if number == 3:
                assert answer == b'', 'its client awaits no answer'
            else:
                assert answer.startswith(b'HTTP/1.1 503 ') and b'\r\nRetry-After: 1\r\n' in answer
                assert json.loads(answer.partition(b'\r\n\r\n')[2]) == {'error': 'too many connections; try again later'}
            client.close()
            clients.append(connect(server.port))
            until(lambda: len(server.server.server_state.connections) == 6)
        for client in clients:
            client.close()


def test_a_connection_more_than_the_limit_is_refused_with_503_while_all_others_are_worked_on():
    held = Held()
    with running(held, timing=Timing(connections=3, shutdown=5)) as server:
        open_ones = [connect(server.port) for _ in range(3)]
        for client in open_ones:
            client.sendall(request(BODY, 'Connection: close'))
        until(lambda: server.batcher.queued + sum(map(len, held.batches)) == 3)
        answer = answer_to(server.port)
        assert answer.startswith(b'HTTP/1.1 503 ') and b'\r\nRetry-After: 1\r\n' in answer and b'too many connections' in answer
        held.go.set()
        for client in open_ones:
            assert read_all(client).startswith(b'HTTP/1.1 200 ')
            client.close()
        until(lambda: not server.server.server_state.connections)
        assert ask(server.port, 'GET', '/health')[0] == 200


def test_a_client_that_takes_no_answer_makes_room_for_others():
    with running(timing=Timing(connections=1, shutdown=5)) as server, socket.socket() as client:
        until(lambda: server.server.started)
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(('127.0.0.1', server.port))
        client.sendall(request(json.dumps({'texts': TEXTS[:100], 'beam': 4, 'nbest': 4, 'alignments': True}).encode()))
        until(lambda: any(one.flow.write_paused for one in list(server.server.server_state.connections)))
        assert post(server.port, {'text': 'Go.'})[0] == 200


def test_stopping_does_not_wait_for_a_client_that_stalls():
    held = Held()
    held.go.set()
    with running(held, read_timeout=READ, timing=Timing(READ, shutdown=5)) as server:
        stalled = [connect(server.port) for _ in range(3)]
        for client, data in zip(stalled, (b'GET / HT', request(b'x' * 100)[:-50], b'\xff\r\n\r\n'), strict=True):
            client.sendall(data)
        assert post(server.port, {'text': 'Go.'})[0] == 200
    for client in stalled:                          # running() has required that the server ended
        client.close()


def flood(port, connections):
    rng = random.Random(1)
    for n in range(connections):
        with connect(port) as client, contextlib.suppress(ConnectionError):
            kind = n % 4
            client.sendall((b'', b'GET / HTTP', request(BODY), b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')[kind])
            if kind == 3:
                assert client.recv(100).startswith(b'HTTP/1.1 200 ')
            if rng.random() < 0.5:                  # close with a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')


def test_1000_connections_one_after_the_other_leave_nothing_behind(server):
    flood(server.port, 1000)
    until(lambda: server.batcher.queued == 0)


@pytest.mark.slow
def test_10000_connections_one_after_the_other_leave_nothing_behind(server):
    flood(server.port, 10_000)
    until(lambda: server.batcher.queued == 0)
