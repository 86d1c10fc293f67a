"""The number of kernel launches of a training step on a GPU, at real sizes, from the emulator's list of launches."""
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without
from emulated import LIBRARY

from bench.launches import H100, launches

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')
# As in docs/cuda.md.  On a GPU a small kernel takes about as long as its launch.
LAUNCHES = {('seq2seq', 'fp32'): (40, 32), ('transformer', 'fp32'): (88, 88), ('transformer', 'bf16'): (90, 89),
            ('base', 'bf16'): (340, 205)}


@pytest.mark.parametrize('step,precision', LAUNCHES)
def test_a_training_step_launches_no_more_kernels_than_the_docs_say(step, precision):
    found = launches(step, precision)
    kernels = {launch.kernel for launch in found}
    assert {'pack_pairs', 'root_of_squares'} <= kernels
    all_of_them, early = LAUNCHES[step, precision]
    assert 0.9 * all_of_them < len(found) <= all_of_them
    assert sum(launch.early for launch in found) == early
    row = re.search(rf"^\| `{step}`, {precision} \| (\d+) \| (\d+) \|$", (ROOT / 'docs' / 'cuda.md').read_text(), re.M)
    assert (int(row[1]), int(row[2])) == LAUNCHES[step, precision]


def test_a_listed_launch_has_its_sizes_and_does_not_run(tmp_path):
    program = """
import json
import numpy as np
from pyops import backend
from pyops.ndarray import use_gpu
use_gpu()
x = backend.put(np.full(1000, 3, np.float32))
backend.launch('fill', x, 1000, 7.0)
print(json.dumps(backend.get(x).tolist()))
"""
    listed = tmp_path / 'launches'
    environment = environment_without() | H100 | {'EMU_LAUNCHES': str(listed)}
    out = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == [3.0] * 1000
    *_, line = listed.read_text().splitlines()
    kernel, grid, threads, shared, cluster, early = line.split('\t')
    assert 'flat' in kernel and grid == '1,1,1' and int(threads) > 0 and shared == '0' and cluster == '1'
    assert early == '1'                                 # as H100 asks
