"""Who translates for the server."""
import threading

from server import TEXTS, checkpoint, model, post, running, until

from pyops.flags import ArgumentParser
from pyops.serve import command
from pyops.serve.batching import Batcher
from pyops.serve.metrics import Metrics
from pyops.serve.workers import Local
from pyops.text import translator


def start_workers(*flags):
    parser = ArgumentParser(prog='serve')
    command.add_flags(parser)
    return command.start_workers(parser.parse_args([checkpoint(), *flags]))


def test_other_processes_give_the_answers_of_this_one_which_has_no_weights(monkeypatch):
    made = []
    monkeypatch.setattr(translator, 'Translator', lambda *_: made.append(1))
    about, workers, warnings = start_workers('--processes', '2', '--threads', '1')
    try:
        assert about == model().about and warnings == () and not made
        local = Local(model())
        for search, alignments in (model().search(), False), (model().search(beam=2, nbest=2, max_len=5), True):
            expected = local(TEXTS[:9], search, alignments)
            assert expected.source_tokens > 9 and expected.output_tokens >= 9
            assert [worker(TEXTS[:9], search, alignments) for worker in workers] == [expected] * 2
    finally:
        for worker in workers:
            worker.close()


def test_with_one_process_the_server_itself_translates():
    about, (worker,), _ = start_workers('--processes', '1')
    assert isinstance(worker, Local) and about == model().about
    assert worker(TEXTS[:2], model().search(), False) == Local(model())(TEXTS[:2], model().search(), False)


def test_requests_are_answered_by_several_workers_at_the_same_time():
    seen = set()

    class Slow(Local):
        def __call__(self, *batch):
            seen.add(id(self))
            until(lambda: len(seen) == 2)               # so neither batch waits for the other
            return super().__call__(*batch)
    with running(workers=[Slow(model()), Slow(model())]) as server:
        status, answer = post(server.port, {'texts': TEXTS[:20]})
    assert status == 200 and [best['text'] for best, *_ in answer['translations']] == model().translate(TEXTS[:20])


def test_a_batch_is_at_most_a_fair_share_of_all_texts():
    begun, released = [], threading.Semaphore(0)

    class Held(Local):
        def __call__(self, texts, *settings):
            begun.append(len(texts))
            released.acquire()
            return super().__call__(texts, *settings)
    batcher = Batcher([Held(model()), Held(model())], Metrics())
    try:
        first = batcher.submit((TEXTS * 3)[:20], model().search())
        until(lambda: len(begun) == 2)
        assert begun == [10, 10]
        second = batcher.submit((TEXTS * 3)[:30], model().search())
        released.release()
        until(lambda: len(begun) == 3)
        assert begun[2] == 20                           # half of 10 that are translated and 30 that wait
    finally:
        released.release(9)
        batcher.close()
    assert all(first.results) and all(second.results) and sum(begun) == 50
