"""The queue of the server, and the batches that its thread makes of it."""
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import TEXTS, Held, model, until

from pyops import backend
from pyops.serve.batching import Batcher, Closed, Full, alike
from pyops.serve.metrics import Metrics
from pyops.serve.workers import Local


@pytest.fixture
def held():
    """A model that is held by the text 'first', and its batcher."""
    held = Held()
    batcher = Batcher([Local(held)], Metrics(), batch_size=8, capacity=20)
    batcher.first = batcher.submit(['first'], model().search())
    assert held.entered.wait(120)
    yield held, batcher
    held.go.set()
    batcher.close()


def texts_of(ticket):
    return [json.loads(found)[0]['text'] for found in ticket.future.result(240)]


def test_texts_of_requests_that_arrive_during_a_batch_are_the_next_batch(held):
    translator, batcher = held
    tickets = [batcher.submit(TEXTS[n:n + 2], model().search()) for n in (0, 2, 4)]
    assert batcher.queued == 6
    translator.go.set()
    assert [texts_of(ticket) for ticket in tickets] == [model().translate(TEXTS[n:n + 2]) for n in (0, 2, 4)]
    assert len(translator.batches) == 2 and sorted(translator.batches[1]) == sorted(TEXTS[:6]) and batcher.queued == 0


def test_texts_with_other_settings_are_another_batch(held):
    translator, batcher = held
    search = model().search
    tickets = [batcher.submit([TEXTS[n]], *key) for n, key in enumerate([
        (search(), False), (search(beam=2), False), (search(), True), (search(length_penalty=0.5), False), (search(), False)])]
    translator.go.set()
    found = [json.loads(ticket.future.result(240)[0])[0] for ticket in tickets]
    assert sorted(map(sorted, translator.batches[1:])) == sorted(
        map(sorted, [[TEXTS[0], TEXTS[4]], [TEXTS[1]], [TEXTS[2]], [TEXTS[3]]]))
    assert ['alignment' in one for one in found] == [False, False, True, False, False]
    assert found[1]['text'] == model().translate(TEXTS[1], beam=2)


def test_a_batch_has_the_oldest_text_and_those_most_similar_in_length(held):
    translator, batcher = held
    short, long = [f'i sleep {n}' for n in range(7)], ['they sleep ' * 9 + str(n) for n in range(8)]
    mixed = [long[0], *short, *long[1:]]
    ticket = batcher.submit(mixed, model().search())
    translator.go.set()
    assert len(ticket.future.result(240)) == 15
    assert sorted(translator.batches[1]) == sorted(long) and sorted(translator.batches[2]) == sorted(short)


def test_the_most_similar_lengths_are_those_of_a_search_of_all_choices():
    rng = random.Random(0)
    for _ in range(200):
        lengths, size = [rng.randrange(20) for _ in range(rng.randrange(1, 12))], rng.randrange(1, 6)
        chosen = alike(lengths, size)
        assert 0 in chosen and len(set(chosen)) == len(chosen) == min(size, len(lengths))
        spread = max(lengths[n] for n in chosen) - min(lengths[n] for n in chosen)
        by_length = sorted(lengths)
        windows = [by_length[n:n + len(chosen)] for n in range(len(lengths) - len(chosen) + 1)]
        assert spread == min(window[-1] - window[0] for window in windows if lengths[0] in window)


def test_a_batch_with_a_large_beam_has_fewer_texts(held):
    translator, batcher = held
    ticket = batcher.submit(TEXTS[:6], model().search(beam=20))
    translator.go.set()
    assert texts_of(ticket) == model().translate(TEXTS[:6], beam=20)
    assert [len(batch) for batch in translator.batches[1:]] == [2, 2, 2]         # 8 * 5 hypotheses


def test_a_request_for_which_the_queue_has_no_room_is_refused_as_a_whole(held):
    _, batcher = held
    batcher.submit(TEXTS[:15], model().search())
    with pytest.raises(Full):
        batcher.submit(TEXTS[:6], model().search())
    assert batcher.queued == 15
    batcher.submit(TEXTS[:5], model().search(beam=2))
    assert batcher.queued == 20


def test_the_texts_of_a_request_that_was_dropped_are_not_translated(held):
    translator, batcher = held
    dropped, kept = batcher.submit(TEXTS[:3], model().search()), batcher.submit(TEXTS[3:5], model().search())
    batcher.drop(dropped)
    batcher.drop(batcher.first)                     # in the present batch: its result is discarded
    assert batcher.queued == 2
    translator.go.set()
    assert texts_of(kept) == model().translate(TEXTS[3:5])
    assert sorted(translator.batches[1]) == sorted(TEXTS[3:5])
    assert not dropped.future.done() and not batcher.first.future.done()


def test_a_text_on_which_the_model_fails_fails_its_request_alone(capsys):
    held = Held(fails=lambda texts: 'bad' in texts)
    held.go.set()
    batcher = Batcher([Local(held)], Metrics(), wait=0.2)
    tickets = [batcher.submit(texts, model().search()) for texts in (TEXTS[:2], ['bad', TEXTS[2], 'bad'], TEXTS[3:4])]
    assert texts_of(tickets[0]) == model().translate(TEXTS[:2]) and texts_of(tickets[2]) == model().translate(TEXTS[3:4])
    assert isinstance(tickets[1].future.exception(240), RuntimeError)
    batcher.close()
    assert capsys.readouterr().err.count('Traceback') == 1


class Failing:
    """A translator that fails once two of them have a text."""
    joins, together = False, threading.Barrier(2)

    def arriving(self, texts, *_):
        text, = texts(1)
        self.together.wait(120)
        raise ValueError(text)


def test_two_workers_fail_texts_of_one_request_at_the_same_time(monkeypatch, capsys):
    both, drop = threading.Barrier(2), Batcher.drop

    def slow_drop(self, ticket):
        both.wait(120)
        drop(self, ticket)
    monkeypatch.setattr(Batcher, 'drop', slow_drop)
    batcher = Batcher([Local(Failing()), Local(Failing())], Metrics(), batch_size=1)
    for texts in (['a', 'b'], ['c', 'd']):              # both workers still run after the first request
        failure = batcher.submit(texts, model().search()).future.exception(240)
        assert isinstance(failure, ValueError) and str(failure) in texts
    batcher.close()
    assert capsys.readouterr().err.count('ValueError: ') == 4


def test_closing_translates_what_was_accepted_and_refuses_more(held):
    translator, batcher = held
    with ThreadPoolExecutor(1) as pool:
        ticket = batcher.submit(TEXTS[:12], model().search())
        closing = pool.submit(batcher.close)
        until(lambda: not batcher.is_ready)
        with pytest.raises(Closed):
            batcher.submit(TEXTS[:1], model().search())
        translator.go.set()
        closing.result(240)
    assert texts_of(ticket) == model().translate(TEXTS[:12])


def test_a_request_without_texts_has_an_empty_result(held):
    assert held[1].submit([], model().search()).future.result(1) == []


def test_the_number_of_threads_is_that_of_the_thread_which_translates():
    """OpenMP has one for each thread that calls it, so that set_threads() in another one has no effect."""
    seen = []
    held = Held(fails=lambda texts: seen.append(backend.threads()))
    held.go.set()
    batcher = Batcher([Local(held, backend.threads() + 2)], Metrics())
    batcher.submit(['Go.'], model().search()).future.result(240)
    batcher.close()
    assert seen == [backend.threads() + 2]
