"""The n-th system call fails once, for every n: nothing is lost, and the next start continues with the same bits."""
import os
import re
import sys
import tempfile

import numpy as np
import pytest
from faults import CALLS, Fault, PowerCut, fail_allocations, fail_writes_and_mappings, remains, tensors_of, train
from places import on_the_cpu

from pyops.errors import UserError

pytestmark = on_the_cpu

# ---- memory ----------------------------------------------------------------------------------------------------------

preloads = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='preloads a library as Linux does: run it there')


@preloads
@pytest.mark.parametrize('threads, least', [(1, 50), (2, 10)])
def test_each_allocation_of_a_kernel_fails_once_with_an_error_and_the_next_call_is_right(threads, least, tmp_path):
    if (failed := fail_allocations(tmp_path, threads)) is None:
        pytest.skip('needs a C compiler: set CC')
    assert failed > least


# ---- files -----------------------------------------------------------------------------------------------------------

@preloads
def test_each_write_and_mapping_of_a_file_fails_once_with_one_line_and_the_next_try_has_the_same_bits(tmp_path):
    if (failed := fail_writes_and_mappings(tmp_path)) is None:
        pytest.skip('needs a C compiler: set CC')
    assert failed > 50


def test_each_file_call_of_a_run_fails_once_and_the_resumed_run_equals_an_undisturbed_one(tmp_path, monkeypatch, capsys):
    rescue = tmp_path / 'rescue'
    rescue.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(rescue))
    train(tmp_path / 'whole')
    expected, failed = tensors_of(tmp_path / 'whole'), []
    for n in range(1, 1000):
        folder = path = tmp_path / f'fault_{n}'
        with monkeypatch.context() as patch:
            fault = Fault(patch, n)
            try:
                train(folder)
            except (UserError, OSError) as error:
                saved = re.search(r'resume with -c (\S+)$', str(error))
                path = saved[1] if saved else folder
        if fault.name is None:
            break
        failed.append(fault.name)
        train(path)
        assert tensors_of(rescue if path != folder else folder) == expected, (n, fault.name)
        assert not list(folder.glob('.*.tmp')), (n, fault.name)
        for file in rescue.iterdir():
            file.unlink()
    assert set(failed) == set(CALLS) - {'unlink'}           # only what a killed process left is removed: test_files.py
    assert len(failed) > 15


@pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='finds the path of a descriptor as Linux does: run it there')
def test_after_a_power_cut_at_any_file_call_the_resumed_run_equals_an_undisturbed_one(tmp_path, monkeypatch, capsys):
    train(tmp_path / 'whole')
    expected, rng, cuts = tensors_of(tmp_path / 'whole'), np.random.default_rng(0), 0
    for n in range(1, 1000):
        folder = tmp_path / f'cut_{n}'
        with monkeypatch.context() as patch:
            fault = Fault(patch, n, cut=True)
            try:
                train(folder)
            except PowerCut:
                cuts += 1
        if fault.name is None:
            break
        if folder.exists():
            fault.lose(folder, rng)
        train(folder)
        assert tensors_of(folder) == expected, (n, fault.name)
    assert cuts > 20


def test_a_power_cut_loses_only_what_was_not_synced_and_in_any_order():
    synced, content = bytes(range(1, 201)), bytes(range(1, 101)) + bytes([255]) * 200
    left = [remains(content, synced, np.random.default_rng(seed)) for seed in range(200)]
    lengths = [len(text) for text in left]
    assert min(lengths) <= 210 and 290 <= max(lengths) <= 300 and all(text[:100] == content[:100] for text in left)
    assert any(text[128:160] == content[128:160] and text[160:192] == synced[160:192] for text in left)
    assert any(text[128:160] == synced[128:160] and text[160:192] == content[160:192] for text in left)
    assert any(bytes(32) in text for text in left)
