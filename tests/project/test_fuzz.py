"""Random inputs of all readers are read, or refused with one line; `make fuzz` runs more of them."""
import dis
import itertools
import json
import os
import random
import subprocess
import sys
import time

import fuzzing
import numpy as np
import pytest
from conftest import ROOT
from fuzzing import TARGETS, Failure, Target, fuzz, limits, outcome, shortened
from probes import Probes

from pyops.errors import UserError
from pyops.inspect.checks import Refused
from scripts import fuzz as script

COUNT = 250                 # inputs of each reader
FOUND = sorted((ROOT / 'tests' / 'golden' / 'fuzz').iterdir())          # READER-NUMBER: inputs that showed a defect, made short


def _require(name):
    if name == 'marian':
        pytest.importorskip('sentencepiece', reason='sentencepiece is not installed: pip install sentencepiece')


@pytest.mark.parametrize('name', TARGETS)
def test_random_inputs_are_read_or_refused_with_one_line(name, tmp_path):
    _require(name)
    found = list(itertools.islice(fuzz(name, 0, tmp_path), COUNT))
    assert [(data, result.text) for data, result in found if isinstance(result, Failure)] == []
    refused = sum(result is not None for _, result in found)
    assert len({data for data, _ in found}) > 0.9 * COUNT
    assert refused < COUNT
    assert refused > COUNT // 25 or name in ('manifest', 'request', 'index')     # these report or leave out what they refuse


@pytest.mark.parametrize('path', FOUND, ids=lambda path: path.name)
def test_an_input_that_once_showed_a_defect(path, tmp_path):
    name = path.name.partition('-')[0]
    _require(name)
    TARGETS[name].seeds(tmp_path)               # a reader may need what makes its valid inputs
    with limits(tmp_path):
        assert not isinstance(result := outcome(TARGETS[name], path.read_bytes()), Failure), result


def reader(run):
    return Target(lambda folder: [b'seed'], lambda rng, data: data + rng.randbytes(1), run)


def forever(path):
    while True:
        pass


def waits(path):
    time.sleep(3600)


def swallows(path):
    try:
        forever(path)
    except Exception:
        pass


def two_lines(path):
    raise Refused('one\ntwo')


@pytest.mark.parametrize('run, kind', [
    (lambda path: json.loads(b'{'), 'JSONDecodeError'), (lambda path: exit(1), 'SystemExit'), (forever, 'Hang'),
    (waits, 'Hang'), (swallows, 'Hang'),
    (lambda path: np.ones(1 << 27).sum(), 'memory'), (lambda path: bytearray(1 << 33), 'MemoryError'),
    (two_lines, 'AssertionError')])
def test_a_reader_that_does_not_survive_is_found(run, kind, tmp_path, monkeypatch):
    if kind == 'Hang':
        monkeypatch.setattr(fuzzing, '_TIMERS', {number: (timer, 0.3) for number, (timer, _) in fuzzing._TIMERS.items()})
    target = reader(run)._replace(errors=(Refused,))
    with limits(tmp_path):
        failure = outcome(target, b'seed')
        assert isinstance(failure, Failure) and failure.kind.startswith(kind), failure
        assert outcome(reader(lambda path: path.read_bytes()), b'seed') is None


def test_the_search_reaches_lines_behind_several_conditions(tmp_path, monkeypatch):
    """A chain of conditions that random bytes meet only one after the other."""
    source = ['def run(data):']
    for place, letter in enumerate(b'abc'):
        source += [f'    if data[{place + 4}:{place + 5}] != bytes([{letter}]):', '        return']
    run = loaded(tmp_path / 'a_reader.py', '\n'.join([*source, '    raise KeyError']))['run']
    grown = Target(lambda folder: [b'seed'], lambda rng, data: data + bytes([rng.choice(b'abcdef')]), run, in_memory=True)
    monkeypatch.setitem(TARGETS, 'idx', grown)
    monkeypatch.setattr(fuzzing, 'PROBES', Probes(tmp_path))
    found, corpus = [], []
    for data, result in itertools.islice(fuzz('idx', 0, tmp_path, corpus=corpus), 2000):
        found.append(data)
        if isinstance(result, Failure):
            break
    assert found[-1][:7] == b'seedabc' and len(set(found)) == len(found)
    assert [data[4:6] for data in corpus][-1] == b'ab' and len(corpus) < 5

    (tmp_path / 'again').mkdir()
    corpus = [b'seedx', b'seedab', b'seedxx', b'seedabc', b'seedaba']
    again = fuzz('idx', 1, tmp_path / 'again', corpus=corpus)
    assert [next(again)[0], next(again)[0]] == [b'seed', b'seedabc']        # of the corpus, those that fail
    assert corpus == [b'seedab']                                            # and reach new lines


def loaded(path, source):
    """Write a file of Python, and return what it defines."""
    path.write_text(source)
    names = {}
    exec(compile(source, str(path), 'exec'), names)
    return names


def test_a_statement_that_runs_for_the_first_time_is_noticed(tmp_path):
    names = loaded(tmp_path / 'code.py', '''
import functools

def outer(kind):
    """A docstring."""
    def inner(n):
        if n:
            return n + 1
        return made[0]
    made = [0]
    return inner

@functools.cache
def several(kind):
    for n in range(3):
        try:
            if kind == n:
                raise KeyError(n)
        except KeyError:
            return kind
        finally:
            kind += 0
    else:
        pass
    match kind:
        case 7:
            return 8

class Kind:
    def method(self):
        return super().__init__()
''')
    outer, several, kind = names['outer'], names['several'], names['Kind']()
    codes, early = [outer.__code__, several.__wrapped__.__code__], outer(0)
    probes = Probes(tmp_path)
    probes.install()
    assert not probes.has_new() and outer.__doc__ == 'A docstring.'
    calls = [lambda: early(1), lambda: early(0), lambda: outer(0), lambda: several(0), lambda: several(9), lambda: several(7),
             kind.method]
    for call in calls:
        call()
        assert probes.has_new() and not probes.has_new()
        call()
        assert not probes.has_new()
    assert outer(0)(1) == 2 and not probes.has_new()        # closures share the probes of their function

    probes.install()
    before = probes_of(several.__wrapped__)
    assert [early(1), several.__wrapped__(1)] == [2, 1] and probes.has_new()
    probes.thin()
    assert probes_of(early) == 1 and 0 < probes_of(several.__wrapped__) < before
    assert [early(1), several.__wrapped__(1)] == [2, 1] and not probes.has_new()
    assert early(0) == 0 and probes.has_new()               # a statement that still has its probe
    assert several.__wrapped__(7) == 8 and probes.has_new()
    probes.thin()
    names['several'].__wrapped__(7)
    assert not probes.has_new()
    probes.remove()
    assert [outer.__code__, several.__wrapped__.__code__] == codes and outer.__code__ is codes[0]
    assert outer(0)(0) == 0 and not probes.has_new()


def probes_of(function):
    return sum(instruction.opname == 'STORE_SUBSCR' for instruction in dis.get_instructions(function))


def test_the_lines_of_a_traceback_stay_with_probes(tmp_path):
    run = loaded(tmp_path / 'code.py', 'def run(x):\n    y = x\n\n    return y / 0\n')['run']
    probes = Probes(tmp_path)
    probes.install()
    with pytest.raises(ZeroDivisionError) as error:
        run(1)
    assert error.traceback[-1].lineno == 3                  # counted from 0
    probes.remove()


def test_the_same_seed_gives_the_same_inputs(tmp_path):
    # in new processes: a line that a cache or an import skips is not reached a second time
    code = ('import itertools, pathlib, sys\n'
            'from fuzzing import fuzz\n'
            'inputs = fuzz("recipe", int(sys.argv[1]), pathlib.Path(sys.argv[2]))\n'
            'print([data for data, _ in itertools.islice(inputs, 60)])')

    paths = os.pathsep.join(map(str, (ROOT, ROOT / 'tests', ROOT / 'tests' / 'helpers')))

    def inputs(folder, seed):
        (tmp_path / folder).mkdir()
        return subprocess.run([sys.executable, '-c', code, str(seed), tmp_path / folder], stdout=subprocess.PIPE, check=True,
                              env=os.environ | {'PYTHONPATH': paths}).stdout
    first = inputs('a', 0)
    assert first == inputs('b', 0) != inputs('c', 1)


@pytest.mark.parametrize('name', TARGETS)
def test_a_mutator_changes_most_inputs(name, tmp_path):
    _require(name)
    target, rng = TARGETS[name], random.Random(0)
    seeds = target.seeds(tmp_path)
    changed = [target.mutate(rng, data) != data for data in seeds[:5] for _ in range(40)]
    assert sum(changed) > 0.7 * len(changed)


def test_a_failing_input_is_made_short():
    data = bytes(range(200))
    assert shortened(data, lambda part: bytes([90]) in part and bytes([7]) in part) == bytes([7, 90])


def test_the_script_saves_an_input_that_ends_the_process_and_runs_it_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, 'FOUND', tmp_path)
    fails = reader(lambda path: len(path.read_bytes()) > 5 and int('x'))
    monkeypatch.setitem(TARGETS, 'npy', fails)
    monkeypatch.setitem(TARGETS, 'idx', fails._replace(run=lambda path: len(path.read_bytes()) > 4 and os._exit(3)))
    assert script.main(['npy', 'idx', '--minutes', '0.02', '--workers', '2']) == 1
    assert {path.name[:4] for path in tmp_path.iterdir() if path.is_file()} == {'npy-', 'idx-'}
    saved = next(path for path in tmp_path.iterdir() if path.name.startswith('npy-'))
    assert len(saved.read_bytes()) == 6                     # made short
    with pytest.raises(ValueError, match='invalid literal'):
        script.main(['--again', str(saved)])
    monkeypatch.setitem(TARGETS, 'npy', fails._replace(errors=(ValueError,)))
    assert script.main(['--again', str(saved)]) == 0 and 'refused : invalid literal' in capsys.readouterr().out
    for arguments, problem in ((['nothing'], 'nothing: no such reader'), (['--again', str(tmp_path)], 'expected a file')):
        with pytest.raises(UserError, match=problem):
            script.main(arguments)


def test_an_error_is_one_printable_line():
    assert str(UserError('a\x1b[2J:\n  b \u2028é')) == 'a\\x1b[2J: b \\u2028é'
