"""The op table rejects wrong kernels; `make mutants` tries all of them."""
import os

import mutants
import numpy as np
import pytest
from places import on_the_cpu
from rows import EACH, Run

from pyops.backend import HOST

pytestmark = on_the_cpu
SOME = 'relu_forward', 'relu_backward', 'layer_norm_backward', 'cross_entropy_forward', 'add_positions_forward'


@pytest.mark.parametrize('kernel', SOME)
def test_the_table_rejects_every_mutant_of_a_kernel(kernel):
    found = mutants.mutants([kernel])
    assert found and [str(mutant) for mutant in found if mutants.killer(mutant) is None] == []


def test_other_kernels_are_tried_on_the_tests_of_strided_arrays_float64_and_optimisers(monkeypatch):
    pytest.importorskip('torch', reason='torch is not installed: pip install torch')        # these tests compare with it
    monkeypatch.setattr(mutants, 'MODULES', ('autograd/test_double',))
    every = mutants._cases_of_modules
    monkeypatch.setattr(mutants, '_cases_of_modules',
                        lambda: (case for case in every() if case.name.startswith('test_values_and_both_derivatives')))
    kernels = 'conv2d_forward_double', 'avg_pool2d_backward_double'
    try:
        assert kernels[0] not in mutants.launches().rows and {*kernels} <= mutants.others()[0].keys()
        for kernel in kernels:
            mutants.prime(kernel)
            found = mutants.mutants([kernel])
            assert {mutant.kernel for mutant in found} == {kernel}
            assert mutants.killer(next(mutant for mutant in found if mutant.kind == 'zeros')) is not None
    finally:
        mutants.others.cache_clear()


def test_the_parameter_of_a_test_may_be_a_dict():
    given, both = dict(patience=1), pytest.param(3, 'a', id='both')
    assert mutants._values(given, 1) == [given] and mutants._values((3, 'a'), 2) == (3, 'a')
    assert mutants._values(both, 2) == (3, 'a') and mutants._values(pytest.param(given), 1) == (given,)


def test_without_a_mutant_the_same_tests_pass():
    row, size = mutants.launches().rows['layer_norm_backward'][0]
    for test in mutants.TESTS:
        test(row, size)
    mutant = mutants.Mutant('layer_norm_backward', 'dx', 'zeros')
    assert mutants.killer(mutant).startswith('test_backward_equals_central_differences (AssertionError)')
    assert 'launch' not in vars(HOST)


def test_a_mutant_that_crashes_is_killed(monkeypatch):
    monkeypatch.setattr(mutants, 'killer', lambda mutant: os.abort())        # no handler of a signal outlives it
    assert mutants.is_killed(mutants.Mutant('relu_forward', 'y', 'zeros'))
    monkeypatch.setattr(mutants, 'killer', lambda mutant: None)
    assert not mutants.is_killed(mutants.Mutant('relu_forward', 'y', 'zeros'))


def test_a_mutant_that_changes_nothing_survives(monkeypatch):
    monkeypatch.setattr(mutants, 'outputs_of', lambda kernel, values: {})
    monkeypatch.setattr(mutants, 'ROWS_TRIED', 1)
    assert mutants.killer(mutants.Mutant('relu_forward', 'y', 'zeros')) is None


def test_the_table_launches_most_kernels_and_their_outputs_are_found():
    rows, outputs = mutants.launches()
    assert len(rows) > 50 and {kernel for kernel, _ in outputs} == set(rows)
    assert {'c'} == {name for kernel, name in outputs if kernel == 'gemm'}


def test_launches_are_seen_with_their_outputs():
    seen = []

    def note(run, kernel, values):
        run()
        seen.append((kernel, {name: np.isfinite(array).all() for name, array in mutants.outputs_of(kernel, values).items()}))
    row, size = next(p.values for p in EACH if p.values[0].name == 'layer_norm')
    with mutants.wrapped(note):
        Run(row, size)
    assert dict(seen)['layer_norm_backward'] == {'dx': True, 'dweight': True, 'dbias': True}


@pytest.mark.parametrize('shape,share', [
    ((), [0]), ((1,), [0]), ((2,), [0]), ((3,), [1]), ((7,), [2, 3]), ((6, 2), [4, 5, 6, 7]), ((1, 1, 4), [1])])
def test_the_share_of_a_thread_is_a_part_in_the_middle_that_can_be_written(shape, share):
    y = np.arange(np.prod(shape)).reshape(shape)
    assert mutants.share_of(y).reshape(-1).tolist() == share
    mutants.share_of(y)[...] = -1
    assert np.flatnonzero(y == -1).tolist() == share
