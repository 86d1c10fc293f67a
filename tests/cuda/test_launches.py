"""The number of kernel launches of a training step on a GPU, at real sizes, from the emulator's list of launches."""
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without
from emulated import LIBRARY

from bench import launches as bench_launches
from bench.launches import H100, launches, listed
from pyops.errors import UserError
from scripts.cuda_resources import symbols

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')
# As in docs/cuda.md.  On a GPU a small kernel takes about as long as its launch.
LAUNCHES = {('seq2seq', 'fp32'): (38, 30), ('seq2seq', 'bf16'): (39, 31), ('transformer', 'fp32'): (87, 87),
            ('transformer', 'bf16'): (89, 89), ('base', 'bf16'): (315, 315), ('gpt2', 'bf16'): (265, 265)}


@pytest.mark.parametrize('step,precision', LAUNCHES)
def test_a_training_step_launches_no_more_kernels_than_the_docs_say(step, precision):
    found = launches(step, precision)
    kernels = {launch.kernel for launch in found}
    assert ({'pack', 'count'} if step == 'gpt2' else {'pack_pairs', 'root_of_squares'}) <= kernels
    all_of_them, early = LAUNCHES[step, precision]
    assert 0.9 * all_of_them < len(found) <= all_of_them
    assert sum(launch.early for launch in found) == early
    row = re.search(rf"^\| `{step}`, {precision} \| (\d+) \| (\d+) \|$", (ROOT / 'docs' / 'cuda.md').read_text(), re.M)
    assert (int(row[1]), int(row[2])) == LAUNCHES[step, precision]


@pytest.mark.parametrize('program,own', [('transformer', ('forward', 'backward')),
                                         ('seq2seq', ('kernel', 'concat_rows'))])
def test_a_program_launches_as_many_kernels_a_step_as_are_counted(program, own, tmp_path):
    """With small vocabularies: the kinds of some products differ, but not their number.

    own: attention and layer norm; all steps of a GRU, rows with a context
    """
    found, _ = listed([sys.executable, '-m', f'{program}.train', '-g', '1', '-f', 'embedded', '--pairs', '400', '--min-count',
                       '1', '-b', '128', '-e', '1', '--precision', 'bf16', '--hold-out', '0', '-c', str(tmp_path)])
    kernels = [launch.kernel for launch in found]
    first, second, *_ = [i for i, kernel in enumerate(kernels) if kernel == 'pack_pairs']
    step = kernels[first:second]
    counted = launches(program, 'bf16')
    assert len(step) == len(counted) <= {'transformer': 90, 'seq2seq': 40}[program]
    for kernel in ('convert', 'root_of_squares', *own):     # convert: the copy of the parameters; the norm, with the log
        assert step.count(kernel) == sum(launch.kernel == kernel for launch in counted) > 0


def test_many_steps_of_the_digits_are_counted_as_the_program_launches_them(tmp_path):
    counted = [launch.kernel for launch in launches('mnist')]
    assert counted.count('network') == 1
    row = re.search(r'^\| `mnist`, 100 steps \| \[?(\d+)', (ROOT / 'docs' / 'cuda.md').read_text(), re.M)
    assert int(row[1]) == len(counted)
    found, _ = listed([sys.executable, '-m', 'mnist.train', '-g', '1', '--embedded', '-e', '2', '--quiet'])
    kernels = [launch.kernel for launch in found]
    text = ' '.join(kernels)
    assert text.count(' '.join(counted)) >= 2, text
    with pytest.raises(UserError, match='--precision bf16: mnist computes its steps in float32; leave it out'):
        bench_launches.precisions_of('mnist', 'bf16')


def test_a_step_in_two_parts_rounds_its_weights_once(tmp_path):
    found, _ = listed([sys.executable, '-m', 'transformer.train', '-g', '1', '-f', 'embedded', '--pairs', '400', '--min-count',
                       '1', '-b', '40', '--accumulate', '2', '-e', '1', '--precision', 'bf16', '--hold-out', '0', '-c',
                       str(tmp_path)])
    kernels = [launch.kernel for launch in found]
    first, _, third, *_ = [i for i, kernel in enumerate(kernels) if kernel == 'pack_pairs']
    assert kernels[first:third].count('convert') == 1
    assert kernels[first:third].count('root_of_squares') == 1       # it is one step


def test_a_count_without_the_header_of_the_library_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_launches, 'ROOT', tmp_path)
    with pytest.raises(UserError, match='^pyops/device.h: no such file; run `make emulated`$'):
        launches('seq2seq')


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
    kernel, grid, threads, shared, cluster, early, address = line.split('\t')
    assert 'flat' in kernel and grid == '1,1,1' and int(threads) > 0 and shared == '0' and cluster == '1'
    assert early == '1'                                 # as H100 asks
    file, symbol = symbols()[int(address, 16)]
    assert file == 'small' and 'flat' in symbol
