"""The number of kernel launches of a training step on a GPU, at real sizes, from the emulator's list of launches."""
import collections
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without
from emulated import LIBRARY

from bench import launches as bench_launches
from bench.launches import H100, ON_PAGE, PAGE, Call, Launch, counted, estimate, launches, listed
from pyops.errors import UserError
from scripts.cuda_resources import readable, symbols
from scripts.generated import text

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')
# As in docs/cuda.md.  On a GPU a small kernel takes about as long as its launch.
LAUNCHES = {('seq2seq', 'fp32'): (38, 30), ('seq2seq', 'bf16'): (39, 31), ('transformer', 'fp32'): (87, 87),
            ('transformer', 'bf16'): (89, 89), ('transformer', 'fp8'): (242, 242), ('base', 'bf16'): (315, 315),
            ('base', 'fp8'): (694, 694), ('gpt2', 'bf16'): (265, 265)}


@pytest.mark.parametrize('step,precision', LAUNCHES)
def test_a_training_step_launches_no_more_kernels_than_the_docs_say(step, precision):
    found, calls = counted(step, precision)
    kernels = {launch.kernel for launch in found}
    assert [launch for call in calls for launch in call.launches] == found
    if (step, precision) in ON_PAGE:
        assert estimate(step, precision, found, calls) in text(PAGE, 'estimates'), 'run python -m bench.launches --write'
    if precision == 'bf16' and step != 'seq2seq':       # its activations are stored so: no tile of attention is float32
        of_attention = {symbol for file, symbol in map(symbols().get, {launch.address for launch in found})
                        if file.startswith('attention')}
        assert {'<__nv_bfloat16' in name for name in readable(of_attention)} == {True}
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


def test_steps_without_layers_in_fp8_are_not_counted_in_it():
    with pytest.raises(UserError, match='^--precision fp8: gpt2 has no layers that multiply in FP8; name transformer or base'):
        bench_launches.precisions_of('gpt2', 'fp8')
    assert [bench_launches.precisions_of(step, None)[-1] for step in ('transformer', 'gpt2')] == ['fp8', 'bf16']
    assert list(bench_launches.steps_in('fp8', False)) == ['transformer', 'base']
    assert 'mnist' in bench_launches.steps_in(None, False) and 'mnist' not in bench_launches.steps_in(None, True)


@pytest.mark.parametrize('precision', ['bf16', 'fp8'])
def test_a_step_in_two_parts_rounds_its_weights_once(precision, tmp_path):
    found, _ = listed([sys.executable, '-m', 'transformer.train', '-g', '1', '-f', 'embedded', '--pairs', '400', '--min-count',
                       '1', '-b', '40', '--accumulate', '2', '-e', '1', '--precision', precision, '--hold-out', '0', '-c',
                       str(tmp_path)])
    kernels = [launch.kernel for launch in found]
    first, _, third, *_ = [i for i, kernel in enumerate(kernels) if kernel == 'pack_pairs']
    assert kernels[first:third].count('convert') == 1
    assert kernels[first:third].count('root_of_squares') == 1       # it is one step
    weights, gradients, inputs = 32, 32, 21
    assert kernels[first:third].count('fp8_encode') == (weights + 2 * (gradients + inputs)) * (precision == 'fp8')


OF_AN_ENCODER_LAYER = """
import numpy as np
from pyops import nn
from pyops.autograd import Tensor
from pyops.nn import attention
from pyops.ndarray import use_gpu
device = use_gpu()
{patch}
layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1)
layer.reset_parameters(0)
layer(Tensor(np.zeros((64, 32, 512), np.float32), requires_grad=True)).sum().backward()
device.synchronize()
"""


def test_a_transformer_layer_launches_fewer_kernels_if_products_add_their_results_to_the_residual():
    separate, joined = (
        collections.Counter(launch.kernel for launch in
                            listed([sys.executable, '-c', OF_AN_ENCODER_LAYER.format(patch=patch)])[0])
        for patch in ('attention._joins = lambda *given: False', ''))
    assert separate['drop'] - joined['drop'] == 2 * 2           # of two sublayers, forward and backward
    assert separate.total() - joined.total() == 2 * 2 + 2       # and two residual sums


def test_an_estimate_is_the_longest_of_operations_bytes_and_latency():
    early, other = (Launch('kernel', '1,1,1', 128, 0, is_early, 0) for is_early in (True, False))
    calls = [Call('gemm', 0.6 * 989e12 * 4e-6, 8.0, 1, [early]), Call('adam', 0.0, 0.8 * 3.35e12 * 3e-6, 1, [other]),
             Call('gru_forward', 1e3, 8.0, 9, [early] * 2), Call('gemm', 0.0, 8.0, 1, [early])]
    assert [round(1e6 * call.seconds('bf16'), 2) for call in calls] == [4.0, 3.0, 7.69, 0.85]
    assert round(1e6 * calls[0].seconds('tf32'), 2) == 8.0
    assert calls[0].seconds('fp8') == calls[0].seconds('bf16')              # of a step in FP8, but another product
    assert round(calls[0].seconds('bf16') / calls[0]._replace(function='gemm_fp8').seconds('fp8'), 2) == 2.0
    lines = estimate('some', 'bf16', [launch for call in calls for launch in call.launches], calls).splitlines()
    assert lines[2:] == ['| `gru_forward` | 2 | 0.0 | 0.0 | 7.7 | 4.6 | 2.3 |', '| `gemm` | 2 | 2.4 | 0.0 | 4.9 | 4.6 | 2.3 |',
                         '| `adam` | 1 | 0.0 | 8.0 | 3.0 | 2.3 | 0.0 |', '| all | 5 | 2.4 | 8.0 | 15.5 | 11.4 | 4.6 |', '',
                         'A step of `some` in bf16 would take 27 us, and 22 with early starts: 17 % less, at 11 % of the peak '
                         'FLOP/s.']


def test_an_estimate_of_one_launch_and_one_of_chosen_steps_are_refused(capsys):
    for arguments, message in ((['mnist', '--estimate'], '--estimate: mnist is one launch; name other steps'),
                               (['base', '--write'], '--write: the steps are chosen; give it alone')):
        with pytest.raises(SystemExit, match='2'):
            bench_launches.main(arguments)
        assert message in capsys.readouterr().err


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
