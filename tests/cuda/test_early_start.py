"""Kernels that may start before the last one has ended: in nvcc's code nothing touches device memory before the wait.

The emulator checks the same in g++'s code.  But nvcc moves loads, and it knows pointers that the emulator does not see.
"""
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

WAIT = 'griddepcontrol.wait'
ENTRY = re.compile(r'\.entry (\w+)\(.*?\n\{\n(.*?)\n\}\n', re.S)
# memory that is not of this block: instructions name shared memory, parameters and stacks
ACCESS = re.compile(r'\b(?:ld|ldu|st|atom|red)\.(?!(?:\w+\.)*(?:param|shared|local)\b)|'
                    r'\bcp\.async\b(?!\.(?:commit|wait))|\bcp\.reduce\b')
FILES = sorted(path.relative_to(ROOT / 'cuda').as_posix() for path in (ROOT / 'cuda').glob('*.cu')
               if 'LAUNCH_DEPENDENT' in path.read_text())
QUICK = 'dropout.cu', 'optim.cu'


def too_early(ptx):
    """Return {kernel: the instructions before its wait that touch device memory, or return}, of all kernels that wait."""
    return {name: [line.strip() for line in body[:body.index(WAIT)].splitlines() if ACCESS.search(line) or 'ret;' in line]
            for name, body in ENTRY.findall(ptx) if WAIT in body}


@pytest.mark.parametrize('file', [file if file in QUICK else pytest.param(file, marks=pytest.mark.slow) for file in FILES])
def test_nvcc_moves_no_access_before_the_wait(file, tmp_path):
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
	ld.param.u64 	%rd1, [early_param_0];
	st.shared.u32 	[%r1], %r2;
	mbarrier.init.shared::cta.b64 [%r1], %r2;
	BEFORE
	griddepcontrol.wait;
	ld.global.f32 	%f1, [%rd1];
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
