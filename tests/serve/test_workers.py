"""The processes that translate for the server."""
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from server import TEXTS, checkpoint, model, post, running, until

from pyops.errors import UserError
from pyops.serve.workers import Local, Start, processes

DEVICE = SimpleNamespace(gpu=None, exact=None, precision=None, threads=1)


@pytest.fixture(scope='module')
def workers():
    found = processes(2, Start(checkpoint(), {'compute': 'float32'}, DEVICE))
    yield found
    for worker in found:
        worker.close()


def test_a_process_gives_the_answers_of_this_one(workers):
    local = Local(model())
    for search, alignments in (model().search(), False), (model().search(beam=2, nbest=2, max_len=5), True):
        expected = local(TEXTS[:9], search, alignments)
        assert expected.source_tokens > 9 and expected.output_tokens >= 9
        assert [worker(TEXTS[:9], search, alignments) for worker in workers] == [expected] * 2


def test_an_error_has_the_traceback_of_the_process(workers):
    with pytest.raises(TypeError, match='text 0: expected str, got int') as error:
        workers[0]([1], model().search(), False)
    assert 'in a process that translates' in error.value.__notes__[0] and 'translator.py' in error.value.__notes__[0]
    assert workers[0](['Go.'], model().search(), False).texts


def test_a_process_that_was_killed_is_started_again(workers):
    killed, connection, sent = workers[1]._process, workers[1]._connection, threading.Event()

    def send(batch):
        connection.send(batch)
        sent.set()
    workers[1]._connection = SimpleNamespace(send=send, recv=connection.recv, close=connection.close)
    killed.send_signal(signal.SIGSTOP)                  # so it cannot answer before it is killed
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(workers[1], TEXTS[:2], model().search(), False)
        assert sent.wait(60)                            # else it would be started again for this batch
        killed.kill()
        with pytest.raises(RuntimeError, match='the process that translated was ended by signal 9'):
            batch.result(60)
    assert len(workers[1](TEXTS[:2], model().search(), False).texts) == 2 and workers[1]._process is not killed


def test_a_checkpoint_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match='nowhere'):
        processes(2, Start(str(tmp_path / 'nowhere'), {}, DEVICE))


def test_a_process_ends_with_its_server():
    """Also if nobody could tell it: the connection is closed."""
    code = (f'import time; from types import SimpleNamespace; from pyops.serve.workers import Process, Start\n'
            f'worker = Process(Start({checkpoint()!r}, {{}}, SimpleNamespace(**{vars(DEVICE)!r}))); worker.wait()\n'
            f'print(worker._process.pid, flush=True); time.sleep(60)')
    server = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    number = int(server.stdout.readline())
    server.kill()
    server.wait()

    def has_ended():
        try:
            with open(f'/proc/{number}/stat') as file:
                return file.read().rpartition(')')[2].split()[0] == 'Z'
        except FileNotFoundError:
            return True
    until(has_ended)


def test_requests_are_answered_by_several_workers_at_the_same_time():
    seen = set()

    class Slow(Local):
        def __call__(self, *batch):
            seen.add(id(self))
            until(lambda: len(seen) == 2)               # so neither batch waits for the other
            return super().__call__(*batch)
    with running(workers=[Slow(model()), Slow(model())]) as server:
        until(lambda: server.batcher._idle == 2)
        status, answer = post(server.port, {'texts': TEXTS[:20]})
    assert status == 200 and [best['text'] for best, *_ in answer['translations']] == model().translate(TEXTS[:20])
