"""Tests of the op table: kernels that are replaced by wrong ones, each of which the table must reject.

A mutant changes one output of one kernel, on the CPU, in this process: launches of the kernel are wrapped.  It is killed if a
test of the op table fails for a row that launches the kernel.  Kernels that the table does not launch, those of optimisers, of
strided arrays and of float64, are tried on the tests of MODULES instead.
"""
import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import draws
import numpy as np
import pytest
import test_table
from conftest import ROOT
from rows import EACH, EXAMPLES, SMALL, Run

from pyops import backend
from pyops.backend import HOST, library
from pyops.backend.arrays import Array
from pyops.backend.device import HOST_ARGUMENTS

KINDS = 'nothing', 'zeros', 'stale', 'last row', 'last column', 'share', 'added'
TESTS = (test_table.test_forward_equals_the_formula_in_float64, test_table.test_backward_equals_central_differences,
         test_table.test_backward_equals_the_slope_along_a_random_direction,
         test_table.test_parameter_gradients_add_and_activation_gradients_overwrite,
         test_table.test_writes_stay_inside_and_nothing_uninitialised_is_read)
AXES = {'last row': 2, 'last column': 2, 'share': 1}        # that an output has at least
ROWS_TRIED = 6              # rows of a kernel on which a mutant is tried, before it counts as a survivor
MODULES = 'backend/test_strided', 'training/test_optim', 'autograd/test_double', 'backend/test_ndarray'
PARAMETERS = 12             # of a test of these modules that are tried, at most
CASES_TRIED = 8             # tests of a kernel that only these modules launch
LONGEST = 2.0               # seconds that a case takes, at most
MOST_SECONDS = 200          # after which a mutant counts as killed


class Mutant(NamedTuple):
    """kind: one of KINDS.  The output keeps its content from before the launch (nothing), only in its last row, last column or
    in the rows of one thread (share), becomes 0 (zeros) or the output of another launch (stale), or the result is added to its
    content (added)."""
    kernel: str
    output: str
    kind: str

    def __str__(self):
        return f'{self.kernel}.{self.output} {self.kind}'


class Launches(NamedTuple):
    """rows: kernel -> [(row, size)] of the op table that launch it, small ones first
    outputs: (kernel, argument) -> largest number of axes of this output"""
    rows: dict
    outputs: dict


class Case(NamedTuple):
    """A test with its parameters."""
    name: str
    run: Callable[[], object]


def outputs_of(kernel, values):
    """Return {argument: array} of the arrays that a launch may write to, without the workspace."""
    arguments = library.cpu().functions[f'pyops_{kernel}'].arguments
    values = [HOST.numpy(value) if isinstance(value, Array) else value for value in values]
    return {a.name: value for a, value in zip(arguments, values, strict=False)
            if a.pointer and not a.const and isinstance(value, np.ndarray) and value.size
            and a.name != 'work' and a.name not in HOST_ARGUMENTS}


@contextlib.contextmanager
def wrapped(wrapper):
    """Inside the block, wrapper(run, kernel, values) is called for each launch on the CPU; run() runs the kernel."""
    launch = HOST.launch
    HOST.launch = lambda kernel, *values: wrapper(lambda: launch(kernel, *values), kernel, values)
    try:
        yield
    finally:
        del HOST.launch


@functools.cache
def launches():
    """Run every row of the op table and return its Launches."""
    small = {id(p.values[0]) for p in SMALL}
    found = Launches({}, {})
    params = [*SMALL, *EXAMPLES, *(p for p in EACH if id(p.values[0]) not in small), *EACH]
    for row, size in dict.fromkeys((p.values[0], p.values[1]) for p in params):
        def note(run, kernel, values, row=row, size=size):
            found.rows.setdefault(kernel, {})[row, size] = None
            for name, array in outputs_of(kernel, values).items():
                found.outputs[kernel, name] = max(found.outputs.get((kernel, name), 0), array.ndim)
            run()
        with wrapped(note):
            Run(row, size)
    return Launches({kernel: list(rows) for kernel, rows in found.rows.items()}, found.outputs)


@functools.cache
def others():
    """Run the tests of MODULES, and return ({kernel: [Case]} of the kernels that the op table does not launch, quick ones
    first, {(kernel, argument): axes} as in Launches)."""
    table, found, outputs = launches().rows, {}, {}
    for case in _cases_of_modules():
        seen = {}

        def note(run, kernel, values, seen=seen):
            if kernel not in table:
                for name, array in outputs_of(kernel, values).items():
                    seen[kernel, name] = max(seen.get((kernel, name), 0), array.ndim)
            run()
        start = time.perf_counter()
        try:
            # No case has several threads: the process of a mutant, a fork, would wait for them for ever.
            with wrapped(note), mock.patch.object(backend, 'set_threads', side_effect=NotImplementedError):
                case.run()
        except BaseException:                   # also of pytest.skip
            continue
        seconds = time.perf_counter() - start
        for (kernel, name), axes in seen.items() if seconds < LONGEST else ():
            outputs[kernel, name] = max(outputs.get((kernel, name), 0), axes)
            found.setdefault(kernel, {})[case] = seconds
    return {kernel: sorted(times, key=times.get) for kernel, times in found.items()}, outputs


def _values(value, count):
    """Return the values of `count` parameters from an element of parametrize, which may be a dict."""
    if isinstance(value, type(pytest.param())):
        return value.values
    return value if count > 1 else [value]


def _cases_of_modules():
    """Yield Cases of the tests that need no other fixture than torch and monkeypatch."""
    for path in MODULES:
        folder, name = (ROOT / 'tests' / path).parent, path.rpartition('/')[2]
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        module = importlib.import_module(name)
        draws.note(module)
        for test in [value for key, value in vars(module).items() if key.startswith('test_')]:
            sets = [[{}]]
            for mark in getattr(test, 'pytestmark', []):
                if mark.name == 'parametrize':
                    names, values = mark.args
                    names = [one.strip() for one in names.split(',')] if isinstance(names, str) else names
                    sets.append([dict(zip(names, _values(value, len(names)), strict=True)) for value in values])
            choices = [functools.reduce(dict.__or__, one) for one in itertools.product(*sets)]
            needs = set(test.__code__.co_varnames[:test.__code__.co_argcount]) - choices[0].keys()
            if needs - {'torch', 'monkeypatch'} or 'torch' in needs and not importlib.util.find_spec('torch'):
                continue
            if 'torch' in needs:
                choices = [one | {'torch': importlib.import_module('torch')} for one in choices]
            for number in np.linspace(0, len(choices) - 1, min(len(choices), PARAMETERS), dtype=int):
                yield Case(test.__name__, functools.partial(_launching, module, test, choices[number], 'monkeypatch' in needs))


def _launching(module, test, named, patches):
    """Run a test so that optimisers launch their kernels, as they do when there is a listener, and do not replay them.
    module: of the test;  patches: whether it needs the fixture monkeypatch"""
    draws.begin(module)
    with (warnings.catch_warnings(action='ignore'), backend.hooks(listen=lambda kernel, values: True),
          pytest.MonkeyPatch.context() as patch):
        test(**named, **({'monkeypatch': patch} if patches else {}))


def cases(kernel):
    """Return the Cases on which the mutants of a kernel are tried."""
    if kernel in launches().rows:
        return [Case(test.__name__, functools.partial(_run_row, test, row, size))
                for row, size in _spread(launches().rows[kernel]) for test in TESTS if _is_in_table(test, row, size)]
    found, seen = others()[0][kernel], Counter()
    first = [case for case in found if not seen[case.name] and not seen.update([case.name])]
    return (first + [case for case in found if case not in first])[:CASES_TRIED]


def _is_in_table(test, row, size):
    """Return whether the op table runs a test with this row at this size: central differences of large arrays take hours."""
    (mark,) = test.pytestmark
    return any(p.values == (row, size) for p in mark.args[1])


def _run_row(test, row, size):
    with _known_differences(row, size):
        test(row, size)


def share_of(y):
    """Return the part of an output that the second of three threads writes, as a view: its rows in the middle, at least one.
    If there is one row, the threads share what is in it."""
    y = np.atleast_1d(y)
    while len(y) == 1 and y.ndim > 1:
        y = y[0]
    first = len(y) // 3
    return y[first:max(first + 1, 2 * len(y) // 3)]


def mutants(kernels=None):
    """Return the Mutants of these kernels, by default of all that the op table or the tests of MODULES launch."""
    outputs = launches().outputs
    if kernels is None or not set(kernels) <= launches().rows.keys():
        outputs = outputs | others()[1]
    return [Mutant(kernel, output, kind) for (kernel, output), axes in sorted(outputs.items())
            for kind in KINDS if (kernels is None or kernel in kernels) and axes >= AXES.get(kind, 0)]


def killer(mutant):
    """Return the name of the first test that fails with a mutant, None if all pass."""
    stale = _other_output(mutant) if mutant.kind == 'stale' else None

    def change(run, kernel, values):
        if kernel != mutant.kernel:
            return run()
        y = outputs_of(kernel, values).get(mutant.output)
        if y is None:
            return run()
        before = y.copy()
        run()
        if mutant.kind == 'nothing':
            y[...] = before
        elif mutant.kind == 'zeros':
            y[...] = 0
        elif mutant.kind == 'stale':
            y[...] = np.resize(stale, y.shape)
        elif mutant.kind == 'last row':
            y[-1:] = before[-1:]
        elif mutant.kind == 'last column':
            y[..., -1:] = before[..., -1:]
        elif mutant.kind == 'share':
            share_of(y)[...] = share_of(before)
        else:
            y[...] = y + before

    for case in cases(mutant.kernel):
        with wrapped(change), np.errstate(all='ignore'):
            try:
                case.run()
            except Exception as error:          # an assertion, or an op that refuses wrong values
                return f'{case.name} ({type(error).__name__})'
    return None


def prime(kernel):
    """Run the tests of a kernel without a mutant: they must pass, and their central differences are kept."""
    for case in cases(kernel):
        case.run()


def is_killed(mutant):
    """Return whether a test fails with a mutant, or its process crashes, as with wrong indices, or does not end.  Call prime()
    first.

    Runs in a child process, which has no OpenMP threads: set one thread."""
    child = os.fork()
    if not child:
        status = 2
        signal.alarm(MOST_SECONDS)
        try:
            status = int(killer(mutant) is None)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 1:
        raise RuntimeError(f'{mutant}: the child process failed')
    return status <= 0


def _spread(rows):
    """Return at most ROWS_TRIED of the rows: the smallest that is not the very first, then others of different ops."""
    ordered = sorted(rows, key=lambda pair: (abs(int(np.prod(np.abs(pair[1]))) - 300), pair[0].name))
    seen = Counter()
    first = [pair for pair in ordered if not seen[pair[0].name] and not seen.update([pair[0].name])]
    return (first + [pair for pair in ordered if pair not in first])[:ROWS_TRIED]


def _other_output(mutant):
    """Return an output of the kernel, flat, that differs from the one in the first row tried: of the last row that has one."""
    rows = launches().rows.get(mutant.kernel)
    runs = [functools.partial(Run, *pair) for pair in _spread(rows)] if rows else [case.run for case in cases(mutant.kernel)]
    kept = []

    def keep(run, kernel, values):
        run()
        if kernel == mutant.kernel and mutant.output in (found := outputs_of(kernel, values)):
            kept.append(found[mutant.output].reshape(-1).copy())
    for run_one in reversed(runs):
        with wrapped(keep):
            run_one()
        if kept:
            break
    return np.roll(kept[-1], 1)


@contextlib.contextmanager
def _known_differences(row, size):
    """Inside the block, central differences of the reference, which no mutant changes, are computed only once for a row."""
    before, calls = test_table.central_differences, iter(range(1000))
    test_table.central_differences = lambda function, value: _differences(row, size, next(calls), function, value, before)
    try:
        yield
    finally:
        test_table.central_differences = before


_kept = {}


def _differences(row, size, number, function, value, compute):
    if (row, size, number) not in _kept:
        _kept[row, size, number] = compute(function, value)
    return _kept[row, size, number]
