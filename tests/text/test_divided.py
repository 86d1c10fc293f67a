"""Windows of texts that several processes translate: order, waiting, processes that end.  The processes are threads here."""
import threading
from collections import Counter

import pytest
from pids import until

from pyops import backend
from pyops.errors import UserError
from pyops.text import divided
from pyops.text.divided import Divided
from pyops.text.processes import Ended
from pyops.text.translator import parts_of

KILLED = Ended('the process that translated was ended by signal 9')


def echo(translator, texts, numbers):
    return [f'{number} {text}' for number, text in zip(numbers, texts, strict=True)]


class Fake:
    """In place of Process: it calls the function in the thread that calls it.   made: all of them"""
    made: list = []
    pid = 0

    def __init__(self, start, threads):
        self.threads, self.calls, self.stopped = threads, [], threading.Event()
        self.waited = self.closed = False
        self.made.append(self)

    def wait(self):
        self.waited = True

    def __call__(self, function, *arguments):
        self.calls.append(arguments)
        return function(self, *arguments)

    def stop(self):
        self.stopped.set()

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The processes that were started."""
    monkeypatch.setattr(divided, 'Process', Fake)
    monkeypatch.setattr(Fake, 'made', [])
    before = backend.threads()
    yield Fake.made
    assert backend.threads() == before and all(one.closed and one.stopped.is_set() for one in Fake.made)


def windows(*sizes):
    """Windows of texts of different lengths; the numbers in them say where they belong."""
    return [[f'{n}.{i}' + 'a' * (i * 7 % 11) for i in range(size)] for n, size in enumerate(sizes)]


def translated(texts, task=echo, number=2, size=4, at_once=True):
    written = []
    with Divided(None, task, (), written.append, size, None, number, at_once) as work:
        work.run(texts)
    return written


def expected(texts):
    """The results of `echo` for windows."""
    flat = [text for window in texts for text in window]
    results = iter(echo(None, flat, range(len(flat))))
    return [[next(results) for _ in window] for window in texts if window]


@pytest.mark.parametrize('number', [1, 2, 3, 4])
@pytest.mark.parametrize('at_once', [False, True])
def test_results_are_in_the_order_of_the_texts_for_any_number_of_processes(number, at_once, made):
    texts = windows(40, 1, 0, 7, 2, 40, 0, 3, 16)
    assert translated(texts, number=number, at_once=at_once) == expected(texts)
    assert len(made) == (number - 1 if at_once else 0)


def test_other_processes_can_be_started_before_the_first_window(made, monkeypatch):
    with Divided(None, echo, (), None, 4, None, 3) as work:
        work.start()
        assert len(made) == len(work.pids) == 2 and all(one.waited for one in made)

    def wait(self):
        raise UserError('damaged checkpoint')
    monkeypatch.setattr(Fake, 'wait', wait)
    with pytest.raises(UserError, match='damaged'), Divided(None, echo, (), None, 4, None, 3) as work:
        work.start()


def test_no_text_starts_no_process(made):
    assert translated([]) == translated([[], []]) == [] and not made


def test_all_processes_translate_at_the_same_time_with_their_part_of_the_threads(monkeypatch, made):
    monkeypatch.setattr(divided, 'shares', lambda number: [2, 1, 1])
    together, seen = threading.Barrier(3), Counter()

    def task(translator, texts, numbers):
        together.wait(240)
        seen[translator and translator.threads or backend.threads()] += 1
        return echo(translator, texts, numbers)
    texts = windows(24)
    assert translated(texts, task, number=3) == expected(texts)             # twelve parts
    assert seen == {2: 4, 1: 8} and [one.threads for one in made] == [1, 1]


def test_parts_have_texts_of_similar_length_and_the_longest_are_first():
    lengths = [n * 37 % 101 for n in range(101)]
    parts = Divided(None, echo, (), None, 8, None, 3)._divide(sorted(range(101), key=lambda n: -lengths[n]))
    assert [lengths[n] for part in parts for n in part] == [*range(100, -1, -1)]
    assert len(parts) == 15 and {len(part) for part in parts} == {6, 7}     # as many for each of three


@pytest.mark.parametrize('texts,workers,size,parts', [
    (1000, 2, 320, 8), (10240, 2, 320, 32), (300, 2, 320, 4), (130, 2, 320, 2), (5, 2, 320, 2), (0, 2, 320, 2),
    (1000, 2, 64, 16)])
def test_a_worker_has_several_parts_unless_they_are_small(texts, workers, size, parts):
    assert parts_of(texts, workers, size) == parts


def test_few_windows_are_read_before_the_first_is_written(made):
    """The other process translates nothing until this one waits for it, with as many windows as it may read."""
    taken, written, pending, begun = [], [], [], threading.Event()

    def source():
        for window in windows(*[8] * 9):
            taken.append(window)
            pending.append(len(taken) - len(written))
            yield window

    def task(translator, texts, numbers):
        if translator:
            begun.set()
            until(lambda: not work._parts and (len(work._windows) == 3 or len(taken) == 9))
        assert begun.wait(240)
        return echo(translator, texts, numbers)
    with Divided(None, task, (), written.append, 4, None, 2, True) as work:
        work.run(source())
    assert written == expected(taken) and len(taken) == 9 and max(pending) == 3


@pytest.mark.parametrize('seconds, starts', [(0.001, False), (0.1, True)])
def test_other_processes_are_started_when_that_saves_time(seconds, starts, made, monkeypatch):
    """By a clock that advances by `seconds` for each text, but by 9 s for the first ones, which record plans."""
    clock = [0.0]
    monkeypatch.setattr(divided.time, 'monotonic', lambda: clock[0])

    def task(translator, texts, numbers):
        if not translator:
            clock[0] += seconds * len(texts) if clock[0] else 9.0
        return echo(translator, texts, numbers)
    texts = windows(64, 8, 1, 64)
    assert translated(texts, task, at_once=False) == expected(texts)
    assert bool(made) == starts


def test_many_short_windows_start_other_processes_after_a_while(made, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(divided.time, 'monotonic', lambda: clock[0])

    def task(translator, texts, numbers):
        clock[0] += 0.01 * len(texts)
        return echo(translator, texts, numbers)
    assert translated(windows(*[17] * 9), task, at_once=False) and not made
    assert translated(windows(*[17] * 40), task, at_once=False) == expected(windows(*[17] * 40)) and len(made) == 1


class Ends:
    """A task that fails in other processes the first `times` times."""

    def __init__(self, times, error):
        self.left, self.error, self.failed = times, error, threading.Event()

    def __call__(self, translator, texts, numbers):
        if translator is None:
            assert self.failed.wait(240)
        elif self.left:
            self.left -= 1
            self.failed.set()
            raise self.error
        return echo(translator, texts, numbers)


def test_a_part_whose_process_ended_is_translated_again(made):
    texts, task = windows(30), Ends(2, KILLED)
    assert translated(texts, task) == expected(texts)
    assert made[0].calls[0] == made[0].calls[1] == made[0].calls[2]


def test_a_process_that_ends_with_the_same_part_again_and_again_is_an_error():
    with pytest.raises(UserError, match='^the process that translated was ended by signal 9, 3 times with the same lines; give '
                                        'fewer with --processes$'):
        translated(windows(30), Ends(3, KILLED))


def test_an_error_of_another_process_ends_the_translation():
    with pytest.raises(KeyError, match='a bug'):
        translated(windows(30), Ends(1, KeyError('a bug')))


def test_an_interruption_stops_the_other_processes_while_they_translate(made):
    begun = threading.Event()

    def task(translator, texts, numbers):
        if translator:
            begun.set()
            assert translator.stopped.wait(240)
            raise KILLED
        return echo(translator, texts, numbers)

    def source():
        yield from windows(40)
        assert begun.wait(240)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), Divided(None, task, (), None, 4, None, 2, True) as work:
        work.run(source())
    assert not any(thread.is_alive() for thread in work._threads)
