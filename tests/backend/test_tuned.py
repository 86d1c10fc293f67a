"""Constants that `make buggify` draws at random: their range has the usual value, which the library of users has."""
import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from places import on_the_cpu

pytestmark = on_the_cpu
CSRC = ROOT / 'csrc'
TUNED = re.compile(r'^#define \w+ PYOPS_TUNED\((\w+), ([^,\n]+), ([^,\n]+), ([^,\n]+), (\d+)\)', re.M)
USES = [(path.name, *match.groups()) for path in sorted(CSRC.glob('*.[ch]'))
        for match in TUNED.finditer(path.read_text())]


def test_constants_have_names_of_their_own():
    names = [name for _, name, *_ in USES]
    assert len(names) > 30 and len(set(names)) == len(names)


@pytest.mark.parametrize('use', USES, ids=[use[1] for use in USES])
def test_the_usual_value_is_one_that_can_be_drawn(use):
    constants = {'COLUMNS': 128, 'CHUNK': 16384}
    usual, least, most, unit = (eval(text, {}, constants) for text in use[2:])
    assert 0 <= least <= usual <= most and (usual - least) % unit == (most - least) % unit == 0


@pytest.mark.skipif(not shutil.which('gcc'), reason='compiles a line of C: install gcc')
@pytest.mark.parametrize('flags,is_constant', [((), True), (('-DPYOPS_BUGGIFY=1',), False)])
def test_they_are_constants_except_in_the_test_build(flags, is_constant, tmp_path):
    source = tmp_path / 'constant.c'
    source.write_text('#include "internal.h"\n_Static_assert(PYOPS_SHARE_FLOATS == 262144, "");\n')
    command = ['gcc', '-std=gnu11', '-fopenmp', '-fsyntax-only', '-I', CSRC, *flags, source]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode == 0) == is_constant, run.stderr
