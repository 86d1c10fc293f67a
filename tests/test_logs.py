"""The reader of saved tensors: everything of a dump, and of files that nobody vouches for whatever is safe to have."""
import dataclasses
import os

import numpy as np
import pytest
from dumps import make_dump

from pyops.inspect.logs import Logs


@pytest.mark.parametrize('as_', ['safetensors', 'pt'])
def test_a_dump_is_read_bit_for_bit_with_or_without_its_manifest(tmp_path, as_, request):
    if as_ == 'pt':
        request.getfixturevalue('torch')
    arrays = make_dump(tmp_path, as_=as_)
    logs = Logs(tmp_path)
    assert logs.skipped == [] and {entry.file for entry in logs.entries} == arrays.keys()
    assert [(entry.step, entry.counter) for entry in logs.entries] == sorted((e.step, e.counter) for e in logs.entries)
    for entry in logs.entries:
        array = entry.load()
        assert array.dtype == np.float32 and array.flags.c_contiguous and np.array_equal(array, arrays[entry.file])
    os.unlink(tmp_path / 'manifest.jsonl')
    assert {bare(entry) for entry in Logs(tmp_path).entries} == {bare(entry) for entry in logs.entries}


def bare(entry):
    return dataclasses.replace(entry, run=0)
