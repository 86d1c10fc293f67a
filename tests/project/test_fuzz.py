"""Random inputs of all readers are read, or refused with one line; `make fuzz` runs more of them."""
import itertools
import json
import os
import random
import time

import fuzzing
import numpy as np
import pytest
from conftest import ROOT
from fuzzing import TARGETS, Failure, Target, fuzz, limits, outcome, shortened

from pyops.errors import UserError
from pyops.inspect.checks import Refused
from scripts import fuzz as script

COUNT = 250                 # inputs of each reader
FOUND = sorted((ROOT / 'tests' / 'golden' / 'fuzz').iterdir())          # READER-NUMBER: inputs that showed a defect, made short


@pytest.mark.parametrize('name', TARGETS)
def test_random_inputs_are_read_or_refused_with_one_line(name, tmp_path):
    found = list(itertools.islice(fuzz(name, 0, tmp_path), COUNT))
    assert [(data, result.text) for data, result in found if isinstance(result, Failure)] == []
    refused = sum(result is not None for _, result in found)
    assert len({data for data, _ in found}) > COUNT // 4
    assert refused < COUNT and (refused > COUNT // 8 or name in ('manifest', 'request'))    # these two report what they refuse


@pytest.mark.parametrize('path', FOUND, ids=lambda path: path.name)
def test_an_input_that_once_showed_a_defect(path, tmp_path):
    name = path.name.partition('-')[0]
    TARGETS[name].seeds(tmp_path)               # a reader may need what makes its valid inputs
    with limits():
        assert not isinstance(result := outcome(TARGETS[name], path.read_bytes(), tmp_path), Failure), result


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
    with limits():
        failure = outcome(target, b'seed', tmp_path)
        assert isinstance(failure, Failure) and failure.kind.startswith(kind), failure
        assert outcome(reader(lambda path: path.read_bytes()), b'seed', tmp_path) is None


def test_the_search_reaches_lines_behind_several_conditions(tmp_path, monkeypatch):
    """A chain of conditions that random bytes meet only one after the other."""
    source = ['def run(path):', '    data = path.read_bytes()']
    for place, letter in enumerate(b'abc'):
        source += [f'    if data[{place + 4}:{place + 5}] != bytes([{letter}]):', '        return']
    names = {}
    exec(compile('\n'.join([*source, '    raise KeyError']), fuzzing._TRACED + 'a_reader', 'exec'), names)
    grown = Target(lambda folder: [b'seed'], lambda rng, data: data + bytes([rng.choice(b'abcdef')]), names['run'])
    monkeypatch.setitem(TARGETS, 'idx', grown)
    found = itertools.islice(fuzz('idx', 0, tmp_path), 2000)
    assert next(data for data, result in found if isinstance(result, Failure))[:7] == b'seedabc'


def test_the_same_seed_gives_the_same_inputs(tmp_path):
    def inputs(folder, seed):
        (tmp_path / folder).mkdir()
        return [data for data, _ in itertools.islice(fuzz('recipe', seed, tmp_path / folder), 60)]
    first = inputs('a', 0)
    assert first == inputs('b', 0) != inputs('c', 1)


@pytest.mark.parametrize('name', TARGETS)
def test_a_mutator_changes_most_inputs(name, tmp_path):
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
    assert script.main(['npy', 'idx', '--minutes', '0.02']) == 1
    assert {path.name[:4] for path in tmp_path.iterdir()} == {'npy-', 'idx-'}
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
