"""python -m pyops serve: its lines, its signals and exit statuses, its token, and what it refuses."""
import json
import os
import re
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import util

import pytest
from server import TEXTS, ask, checkpoint, command, model, post, until

from pyops.__main__ import main
from pyops.serve import command as module


@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_after_the_accepted_requests_with_128_and_its_number(number, status):
    """--wait 1500: the request is in the queue when the signal comes."""
    with command('--wait', '1500') as process, ThreadPoolExecutor(1) as pool:
        name = os.path.basename(model().path)
        assert process.line == f'serving transformer {name} at http://127.0.0.1:{process.port} (Ctrl-C ends)\n'
        answer = pool.submit(post, process.port, {'texts': TEXTS[:3]})
        until(lambda: '\npyops_queue_texts 3' in ask(process.port, 'GET', '/metrics')[2].decode())
        process.send_signal(number)
        until(lambda: process.stderr.readline().startswith('finishing the accepted requests'))
        process.send_signal(signal.SIGTERM)             # supervisors often send two
        found = answer.result(240)[1]['translations']
        assert [best['text'] for best, in found] == model().translate(TEXTS[:3])
        assert process.wait(120) == status
        assert re.search(r'"POST /translate" 200 [\d.]+ ms 3 texts$', process.stderr.read())


def test_a_second_ctrl_c_does_not_wait_for_the_accepted_requests():
    with command('--wait', '25000') as process, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, process.port, 'POST', '/translate', b'{"text": "Go."}')
        until(lambda: '\npyops_queue_texts 1' in ask(process.port, 'GET', '/metrics')[2].decode())
        process.send_signal(signal.SIGINT)
        until(lambda: 'finishing' in process.stderr.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130
        status, _, body = answer.result(120)
        assert (status, json.loads(body)) == (503, {'error': 'the server is shutting down'})
        assert 'Traceback' not in process.stderr.read()


def test_quiet_writes_nothing_to_standard_error():
    with command('--quiet') as process:
        assert post(process.port, {'text': 'Go.'})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
        assert process.stderr.read() == 'finishing the accepted requests (Ctrl-C again leaves at once)\n'


@pytest.mark.parametrize('where', ['file', 'environment'])
def test_the_token_is_read_from_a_file_or_the_environment(where, tmp_path):
    (tmp_path / 'token').write_text('of-file\n')
    flags = ['--token-file', tmp_path / 'token'] if where == 'file' else []
    with command('--quiet', *flags, PYOPS_SERVE_TOKEN='of-environment') as process:
        assert post(process.port, {'text': 'Go.'})[0] == 401
        assert post(process.port, {'text': 'Go.'}, Authorization=f'Bearer of-{where}')[0] == 200


def test_limits_of_the_flags_are_those_of_the_server():
    with command('--quiet', '--max-texts', '2', '--max-chars', '10', '--max-body', '200', '--read-timeout', '0.2') as process:
        for fields, status in (({'texts': ['a'] * 3}, 413), ({'text': 'a' * 11}, 413), ({'texts': ['\xe9' * 10] * 2}, 200),
                               ({'text': 'a', 'x' * 200: 1}, 413)):
            assert post(process.port, fields)[0] == status, fields
        with socket.create_connection(('127.0.0.1', process.port), timeout=120) as client:
            assert client.recv(100).startswith(b'HTTP/1.1 408 ')


def refused(capsys, *flags):
    """The one line with which the command refuses its flags."""
    with pytest.raises(SystemExit) as exit:
        main(['serve', *map(str, flags)])
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, '') and err.count('\n') == 1
    return err


def test_what_cannot_be_served_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(module.TOKEN, raising=False)
    (tmp_path / 'words').write_text('two words')
    (tmp_path / 'empty').touch()
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        for flags, message in (
                ((checkpoint(), '--port', port), f'--port {port}: already in use by another program; stop it, or give'),
                ((tmp_path / 'nowhere', '--port', 0), 'nowhere'),
                ((tmp_path, '--port', 0), 'no checkpoint'),
                ((checkpoint(), '--port', 65536), '--port: expected a whole number from 0 to 65535, got 65536'),
                ((checkpoint(), '--host', 'no such host'), '--host no such host: unknown address'),
                ((checkpoint(), '--max-texts', 10, '--queue', 5), '--max-texts 10: expected at most --queue 5; raise --queue'),
                ((checkpoint(), '--timeout', 0.01), '--timeout: expected 0.05 to 86400 seconds, got 0.01'),
                ((checkpoint(), '--max-body', '2G'), '--max-body: expected 1 byte to 1G, got 2G'),
                ((checkpoint(), '--token-file', tmp_path / 'none'), 'cannot be read (No such file or directory); give a text'),
                ((checkpoint(), '--token-file', tmp_path / 'words'), 'expected one word of 1 to 1024 printable ASCII'),
                ((checkpoint(), '--token-file', tmp_path / 'empty'), 'expected one word of 1 to 1024 printable ASCII'),
                ((), 'the following arguments are required: CKPT')):
            assert message in refused(capsys, *flags)


def test_the_limit_of_open_files_is_raised_for_the_connections_or_named(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (256, 600))
    monkeypatch.setattr(resource, 'setrlimit', lambda kind, limits: given.append(limits))
    module.allow_files(100)
    assert given == []
    module.allow_files(500)
    assert given == [(564, 600)]
    assert refused(capsys, checkpoint(), '--connections', 537) == (
        'pyops: error: --connections 537: needs 601 open files, and 600 are permitted; give at most 536, or raise the limit '
        '(ulimit -Hn)\n')


@pytest.mark.parametrize('package', ['starlette', 'uvicorn', 'uvloop'])
def test_without_its_packages_it_names_the_extra(package, capsys, monkeypatch):
    find_spec = util.find_spec
    monkeypatch.setattr(util, 'find_spec', lambda name: None if name == package else find_spec(name))
    assert refused(capsys, checkpoint()) == (
        f"pyops: error: serve: the Python package {package} is not installed; install it with: {sys.executable} -m pip install "
        "'pyops[serve]' (in the source tree: '.[serve]')\n")


def test_an_address_of_other_machines_without_a_token_is_a_warning(tmp_path):
    with command('--host', '0.0.0.0') as process:
        assert 'warning: --host 0.0.0.0: everybody who reaches this address can translate; give' in process.stderr.readline()
        assert json.loads(ask(process.port, 'GET', '/health')[2])['ready']


def test_help_does_not_import_the_packages_of_the_server(capsys, monkeypatch):
    for name in 'starlette', 'uvicorn', 'uvloop':
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as exit:
        main(['serve', '--help'])
    assert exit.value.code == 0 and '--token-file' in capsys.readouterr().out
