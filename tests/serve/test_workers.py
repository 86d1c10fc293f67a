"""Who translates for the server."""
import json
import threading

import pytest
from server import TEXTS, Held, checkpoint, model, post, running, until

from pyops.flags import ArgumentParser
from pyops.serve import command
from pyops.serve.api import encoded
from pyops.serve.batching import Batcher
from pyops.serve.metrics import Metrics
from pyops.serve.workers import Done, End, Failed, Job, Local, Ready
from pyops.text import translator
from pyops.text.processes import Ended


def start_workers(*flags):
    parser = ArgumentParser(prog='serve')
    command.add_flags(parser)
    return command.start_workers(parser.parse_args([checkpoint(), *flags]))


def ended(worker):
    """Return the answers of a worker to its last jobs."""
    worker.send(End())
    answers = []
    with pytest.raises(Ended):
        while True:
            answers.append(worker.receive())
    worker.close()
    return answers


def job(number, texts, search=None, alignments=False, most=4):
    return Job(number, search or model().search(), alignments, most, list(texts))


def test_other_processes_give_the_answers_of_this_one_which_has_no_weights(monkeypatch):
    expected, made = model().about, []
    monkeypatch.setattr(translator, 'Translator', lambda *_: made.append(1))
    about, workers, warnings = start_workers('--processes', '2', '--threads', '1')
    assert about == expected and warnings == () and not made
    search = model().search(beam=2, nbest=2, max_len=5)
    plain, aligned = model().translations(TEXTS[:9]), model().translations(TEXTS[:9], 2, 2, max_len=5, alignments=True)
    for worker in (*workers, Local(model(), 1)):
        assert worker.receive() == Ready(True)
        worker.send(job(7, enumerate(TEXTS[:5])))
        worker.send(job(7, enumerate(TEXTS[5:9], 5)))                       # it joins
        worker.send(job(8, enumerate(TEXTS[:9], 20), search, True))
        answers = ended(worker)
        assert all(isinstance(answer, Done) for answer in answers) and len(answers) > 4
        found = [pair for answer in answers for pair in answer.texts]
        assert sorted(number for number, _ in found[:9]) == [*range(9)]
        found = dict(found)
        assert found == {n: encoded(some) for n, some in [*enumerate(plain), *enumerate(aligned, 20)]}
        assert sum(answer.source_tokens for answer in answers) == 2 * sum(len(best.source) for best, *_ in plain)
        assert sum(answer.output_tokens for answer in answers) == sum(len(best.tokens) for best, *_ in (*plain, *aligned))


def test_texts_that_fail_are_named_and_the_next_ones_are_translated():
    held = Held(fails=lambda texts: 'bad' in texts)
    held.go.set()
    worker = Local(held)
    assert worker.receive() == Ready(False)
    worker.send(job(0, enumerate([*TEXTS[:4], 'bad', *TEXTS[4:9]])))
    first, failed, last = ended(worker)
    assert [number for number, _ in first.texts] == [0, 1, 2, 3] and [number for number, _ in last.texts] == [8, 9]
    assert isinstance(failed, Failed) and sorted(failed.numbers) == [4, 5, 6, 7] and 'a bug' in str(failed.error)


def test_a_failure_before_a_text_is_taken_fails_all_texts(monkeypatch):
    class Broken:
        joins = True

        def arriving(self, *_):
            raise MemoryError
    worker = Local(Broken())
    worker.send(job(0, enumerate(TEXTS[:3])))
    _, failed = ended(worker)
    assert failed.numbers == [0, 1, 2] and isinstance(failed.error, MemoryError)


def test_with_one_process_the_server_itself_translates():
    about, (worker,), _ = start_workers('--processes', '1')
    assert isinstance(worker, Local) and about == model().about
    worker.send(job(0, enumerate(TEXTS[:2])))
    found = dict(pair for answer in ended(worker)[1:] for pair in answer.texts)
    assert [json.loads(found[n])[0]['text'] for n in range(2)] == model().translate(TEXTS[:2])


def test_requests_are_answered_by_several_workers_at_the_same_time():
    both = threading.Barrier(2)

    class Slow(Held):
        def arriving(self, texts, *settings):
            both.wait(120)                               # so neither waits for the other
            return model().arriving(texts, *settings)
    with running(workers=[Local(Slow()), Local(Slow())]) as server:
        status, answer = post(server.port, {'texts': TEXTS[:20]})
    assert status == 200 and [best['text'] for best, *_ in answer['translations']] == model().translate(TEXTS[:20])


class Counted(Held):
    """A Held whose texts wait for a permit each time.   begun: their numbers"""

    def __init__(self, permits, begun):
        super().__init__(lambda texts: begun.append(len(texts)) or not permits.acquire())
        self.go.set()


def test_a_worker_gets_at_most_a_fair_share_of_all_texts():
    begun, permits = [], threading.Semaphore(0)
    batcher = Batcher([Local(Counted(permits, begun)) for _ in range(2)], Metrics())
    try:
        first = batcher.submit((TEXTS * 3)[:20], model().search())
        until(lambda: len(begun) == 2)
        assert begun == [10, 10]
        second = batcher.submit((TEXTS * 3)[:30], model().search())
        permits.release()
        until(lambda: len(begun) == 3)
        assert begun[2] == 20                           # half of 10 that are translated and 30 that wait
    finally:
        permits.release(9)
        batcher.close()
    assert all(first.results) and all(second.results) and sum(begun) == 50


class Recorded:
    """A worker that others can join.   jobs: what it was given"""

    def __init__(self):
        self.jobs, self._answers = [], threading.Semaphore(0)
        self._queue = [Ready(True)]
        self._answers.release()

    def send(self, job):
        self.jobs.append(job)
        if job == End():
            self.answer(None)

    def answer(self, answer):
        self._queue.append(answer)
        self._answers.release()

    def receive(self):
        self._answers.acquire()
        answer = self._queue.pop(0)
        if answer is None:
            raise Ended
        return answer

    def finish(self, *numbers):
        self.answer(Done([(number, 'x') for number in numbers], 0, 0))

    def close(self):
        pass

    @property
    def given(self):
        return [[text for _, text in job.texts] for job in self.jobs if isinstance(job, Job)]

    def number(self, wanted):
        return next(number for job in self.jobs for number, text in job.texts if text == wanted)


def test_texts_join_those_with_equal_settings_and_go_to_the_worker_that_has_the_fewest():
    workers, search = [Recorded(), Recorded()], model().search()
    batcher = Batcher(workers, Metrics(), batch_size=8, wait=0.001)
    tickets = []

    def submit(*texts, beam=search):
        tickets.append(batcher.submit(texts, beam))
        return tickets[-1]

    def given():
        return [worker.given for worker in workers]
    until(lambda: all(working.is_ready for working in batcher._working))
    submit('a', 'b')
    until(lambda: given() == [[['a', 'b']], []])
    submit('c')
    until(lambda: given() == [[['a', 'b']], [['c']]])
    submit('d')
    until(lambda: given() == [[['a', 'b']], [['c'], ['d']]])
    first, second = (worker.jobs for worker in workers)
    assert second[0].number == second[1].number != first[0].number and second[0][1:4] == second[1][1:4]
    other = submit('e', beam=model().search(beam=2))            # waits until a worker has no other texts
    last = submit('f')                                          # and does not overtake
    workers[1].finish(workers[1].number('c'))
    assert tickets[1].future.result(120) == ['x'] and batcher.queued == 2
    workers[1].finish(workers[1].number('d'))
    until(lambda: workers[1].given == [['c'], ['d'], ['e']] and workers[0].given == [['a', 'b'], ['f']])
    assert second[2].number not in (second[0].number, first[0].number) and second[2].search.beam == 2
    workers[1].finish(workers[1].number('e'))
    assert other.future.result(120) == ['x'] and not last.future.done()
    workers[0].finish(*(workers[0].number(text) for text in 'fba'))
    batcher.close()
    assert [ticket.future.result(0) for ticket in tickets] == [['x', 'x'], ['x'], ['x'], ['x'], ['x']]
