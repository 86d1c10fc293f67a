"""Kernels that may start before the last one has ended: in nvcc's code nothing touches device memory before the wait.

The emulator checks the same in g++'s code.  But nvcc moves loads, and it knows pointers that the emulator does not see.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without
from emulated import LIBRARY

WAIT = 'griddepcontrol.wait'
ENTRY = re.compile(r'\.entry (\w+)\(.*?\n\{\n(.*?)\n\}\n', re.S)
# memory that is not of this block: instructions name shared memory, parameters and stacks
ACCESS = re.compile(r'\b(?:ld|ldu|st|atom|red)\.(?!(?:\w+\.)*(?:param|shared|local)\b)|'
                    r'\bcp\.async\b(?!\.(?:commit|wait))|\bcp\.reduce\b')
FILES = sorted(path.relative_to(ROOT / 'cuda').as_posix() for path in (ROOT / 'cuda').glob('*.cu')
               if 'LAUNCH_DEPENDENT' in path.read_text())
QUICK = 'dropout.cu', 'optim.cu'
LONG = 'attention.cu', 'gemm.cu', 'hopper_gemm.cu', 'layer_norm.cu'


def too_early(ptx):
    """Return {kernel: the instructions before its wait that touch device memory, or return}, of all kernels that wait."""
    return {name: [line.strip() for line in body[:body.index(WAIT)].splitlines() if ACCESS.search(line) or 'ret;' in line]
            for name, body in ENTRY.findall(ptx) if WAIT in body}


@pytest.mark.parametrize('file', [file if file in QUICK else pytest.param(file, marks=pytest.mark.slow) for file in FILES])
def test_nvcc_moves_no_access_before_the_wait(file, tmp_path):
    if file in LONG and 'PYOPS_TEST_PTX' not in os.environ:
        pytest.skip('compiles for half a minute: PYOPS_TEST_PTX=1 python -m pytest --slow tests/cuda/test_early_start.py')
    if not shutil.which('nvcc'):
        pytest.skip('nvcc is not installed: install the CUDA toolkit')
    includes = [f'-I{ROOT / folder}' for folder in ('cuda', 'cuda/common', 'csrc')]
    done = subprocess.run(['nvcc', '-std=c++17', '-O3', *includes, '-arch=compute_90a', '-DPYOPS_FOR_90A', '-ptx', '-o',
                           tmp_path / 'out.ptx', ROOT / 'cuda' / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = too_early((tmp_path / 'out.ptx').read_text())
    assert found and not any(found.values()), found


KERNEL = '''\
.visible .entry early(
    .param .u64 early_param_0
)
{
    ld.param.u64     %rd1, [early_param_0];
    st.shared.u32     [%r1], %r2;
    mbarrier.init.shared::cta.b64 [%r1], %r2;
    BEFORE
    griddepcontrol.wait;
    ld.global.f32     %f1, [%rd1];
    ret;

}
'''


@pytest.mark.parametrize('before', [
    'ld.global.f32 %f1, [%rd1];', 'ld.global.nc.f32 %f1, [%rd1];', 'ld.volatile.global.u32 %r3, [%rd1];', '@%p1 ret;',
    'ld.f32 %f1, [%rd1];', 'st.global.f32 [%rd1], %f1;', 'atom.acq_rel.gpu.global.add.u32 %r3, [%rd1], %r2;',
    'red.release.gpu.global.add.u32 [%rd1], %r2;', 'cp.async.ca.shared.global [%r1], [%rd1], 4, %r2;',
    'cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r3, %r4}], [%r2];'])
def test_an_access_before_the_wait_is_found(before):
    assert too_early(KERNEL.replace('BEFORE', before)) == {'early': [before]}


@pytest.mark.parametrize('before', ['ld.shared.f32 %f1, [%r1];', 'ld.volatile.shared.u32 %r3, [%r1];',
                                    'st.local.u32 [%r1], %r2;', 'cp.async.commit_group;', 'add.s32 %r3, %r1, %r2;'])
def test_shared_memory_may_be_prepared_before_the_wait(before):
    assert too_early(KERNEL.replace('BEFORE', before)) == {'early': []}


PROGRAM = """
from pyops import backend
from pyops.ndarray import use_gpu
gpu = use_gpu()
backend.launch('fill', backend.zeros(10), 10, 7.0)
try:
    gpu.early_start = 'always'
except ValueError as error:
    print(error)
backend.launch('fill', backend.zeros(10), 10, 7.0)
"""


@pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')
@pytest.mark.parametrize(('capability', 'variable', 'early'), [('9.0', '1', [True, True]), ('9.0', '0', [False, True]),
                                                               ('8.0', '1', [False, False])])
def test_an_older_device_ignores_the_variable_and_refuses_the_setting(capability, variable, early, tmp_path):
    listed = tmp_path / 'launches'
    environment = environment_without() | {'PYOPS_EMULATE_CUDA': '1', 'EMU_CAPABILITY': capability, 'EMU_LAUNCHES': str(listed),
                                           'PYOPS_EARLY_START': variable}
    out = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    fills = [line.split('\t') for line in listed.read_text().splitlines() if 'flat' in line]
    assert [columns[5] == '1' for columns in fills] == early
    assert out.stdout.startswith('set_early_start: early_start=2, expected 0 or 1: ' if capability == '8.0' else '')
    assert bool(out.stdout) == (capability == '8.0')
