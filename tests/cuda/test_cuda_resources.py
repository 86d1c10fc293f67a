"""The table of registers and spills, from a piece of the compiler's output; the page, and the kernels of the sources."""
import re
import shutil
from unittest import mock

import pytest
from emulated import LIBRARY

from bench.launches import Launch, launches
from pyops.errors import UserError
from scripts import cuda_resources

pytestmark = pytest.mark.skipif(not shutil.which('c++filt'), reason='c++filt is missing: install binutils')

KERNEL = re.compile(r'__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(')
DWEIGHT = '_Z7dweightIL9Precision0EEvN56_GLOBAL__N__63402845_23_linear_cross_entropy_cu_c9dde8ee4CallEl'
PTXAS = f'''\
  nvcc build/resources/linear_cross_entropy.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{DWEIGHT}' for 'sm_80'
ptxas info    : Function properties for {DWEIGHT}
    8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 123 registers, used 1 barriers
  nvcc build/resources/common/small.o
ptxas info    : Compiling entry function '_Z4fillPflf' for 'sm_90a'
ptxas info    : Function properties for _Z4fillPflf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 384 bytes smem
'''
FINE = PTXAS.replace('8 bytes stack frame, 16 bytes spill stores, 12', '0 bytes stack frame, 0 bytes spill stores, 0')


def resources(tmp_path, log):
    path, page = tmp_path / 'log', tmp_path / 'page.md'
    path.write_text(log)
    page.write_text('<!-- resources -->\n<!-- /resources -->\n')
    cuda_resources.main(['--log', str(path), '--page', str(page)])
    return page.read_text()


def test_the_table_of_cuda_kernels_has_registers_shared_memory_and_spills(tmp_path):
    with pytest.raises(UserError, match='spills 16 bytes'):             # the table is written before the error is raised
        resources(tmp_path, PTXAS)
    lines = (tmp_path / 'page.md').read_text().splitlines()
    assert '| linear_cross_entropy | `dweight<0>` | 123 | 0 | 16 |  |  |  |' in lines
    assert '| small | `fill` |  |  |  | 31 | 384 | 0 |' in lines


def test_a_table_of_some_files_keeps_the_lines_of_the_others(tmp_path, monkeypatch):
    before = resources(tmp_path, FINE)
    log, page = tmp_path / 'log', tmp_path / 'page.md'
    log.write_text(FINE.replace('Used 31 reg', 'Used 33 reg').replace('Used 123 reg', 'Used 99 reg'))
    cuda_resources.main(['small', '--log', str(log), '--page', str(page)])
    assert page.read_text() == before.replace('| 31 | 384 | 0 |', '| 33 | 384 | 0 |') != before
    monkeypatch.setattr(cuda_resources, 'BUILD', tmp_path)
    with pytest.raises(UserError, match='^no_such_file: not found in cuda/ and cuda/common/; give the name of a .cu file'):
        cuda_resources.main(['no_such_file', '--page', str(page)])
    assert log.exists()                             # the objects of another run are not deleted


@pytest.mark.parametrize('log, problem', [
    (PTXAS, r'linear_cross_entropy: dweight<0> \(sm_80\): spills 16 bytes'),
    (FINE + 'ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x',
     'ptxas info : .* serialized due to x'),
    ('', 'no kernel in the output of the compiler; expected the output of nvcc -Xptxas -v')])
def test_a_cuda_kernel_that_spills_or_serialises_is_an_error(log, problem, tmp_path):
    with pytest.raises(UserError, match=f'^{problem}$'):
        resources(tmp_path, log)


def checked(tmp_path, log, page):
    """Compare a log with the table that another log gives."""
    resources(tmp_path, page)
    path = tmp_path / 'log'
    path.write_text(log)
    before = (tmp_path / 'page.md').read_text()
    try:
        cuda_resources.main(['--check', '--log', str(path), '--page', str(tmp_path / 'page.md')])
    finally:
        assert (tmp_path / 'page.md').read_text() == before


@pytest.mark.parametrize('before, after, problem', [
    ('Used 123 ', 'Used 123 ', None),
    ('Used 123 ', 'Used 122 ', None),
    ('Used 123 ', 'Used 128 ', None),
    ('Used 123 ', 'Used 129 ', r'linear_cross_entropy: dweight<0> \(sm_80\): 129 registers, on the page 123: if that is '
     'wanted, update it with python -m scripts.cuda_resources linear_cross_entropy'),
    ("for 'sm_80'", "for 'sm_90a'", r'linear_cross_entropy: dweight<0> \(sm_90a\): 123 registers, on the page 0: .*; '
     r'linear_cross_entropy: dweight<0> \(sm_80\): on the page, but not in the build: update the page with .*'),
    ('0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 31', '32 bytes stack frame, 0 bytes '
     'spill stores, 0 bytes spill loads\nptxas info    : Used 31',
     r'small: fill \(sm_90a\): 32 bytes of local memory: index its arrays by constants'),
    ('  nvcc build/resources/common/small.o', 'ptxas info : (C7517) warpgroup.wait is injected in around line 523\n'
     '  nvcc build/resources/common/small.o', r'ptxas info : \(C7517\) warpgroup.wait is injected in around line 523')],
    ids=['equal', 'fewer registers', 'the same unit', 'more registers', 'no line', 'local memory', 'injected wait'])
def test_a_check_compares_with_the_page_and_writes_nothing(before, after, problem, tmp_path):
    assert FINE.count(before) == 1
    if not problem:
        return checked(tmp_path, FINE.replace(before, after), FINE)
    with pytest.raises(UserError, match=f'^{problem}$'):
        checked(tmp_path, FINE.replace(before, after), FINE)


def test_a_file_whose_kernels_were_not_compiled_is_an_error(tmp_path):
    (tmp_path / 'log').write_text(FINE)
    with pytest.raises(UserError, match='^gemm: no kernel in the output of the compiler$'):
        cuda_resources.main(['--check', 'small', 'gemm', '--log', str(tmp_path / 'log')])


@pytest.fixture(scope='module')
def slow(tmp_path_factory):
    """Compile tests/cuda/slow.cu as the library is compiled -> the compiler's output, the object file."""
    if not shutil.which('nvcc'):
        pytest.skip('nvcc is not installed: install the CUDA toolkit')
    root = tmp_path_factory.mktemp('tree')
    (root / 'cuda').mkdir()
    for path in 'Makefile', 'csrc', 'cuda/common':
        (root / path).symlink_to(cuda_resources.ROOT / path)
    shutil.copy(cuda_resources.ROOT / 'tests' / 'cuda' / 'slow.cu', root / 'cuda')
    with mock.patch.multiple(cuda_resources, ROOT=root, BUILD=root / 'build'):
        return cuda_resources.compiled(['slow']), root / 'build' / 'slow.o'


def test_each_slow_kernel_that_nvcc_compiles_is_named(slow, tmp_path):
    """Three kernels of slow.cu must fail, and the fourth must not."""
    with pytest.raises(UserError) as written:
        resources(tmp_path, slow[0])
    with pytest.raises(UserError) as compared:
        cuda_resources.main(['--check', '--log', str(tmp_path / 'log'), '--page', str(tmp_path / 'page.md')])
    for text in map(str, (written.value, compared.value)):
        assert re.search(r'slow: spilling \(sm_80\): spills \d+ bytes', text) and 'slow: spilling (sm_90a): spills' in text
        assert re.search(r'\(C75\d\d\) .*wgmma.mma_async instructions are serialized', text)
        assert 'multiplyingILb1E' in text and 'multiplyingILb0E' not in text and 'multiplying<false>' not in text
    assert 'slow: indexing (sm_90a): 32 bytes of local memory' in str(compared.value) and 'indexing' not in str(written.value)
    assert 'on the page' not in str(compared.value)


def test_the_instructions_of_serialised_products_show_it(slow):
    path = cuda_resources.tools()
    if not shutil.which('cuobjdump', path=path) or not shutil.which('nvdisasm', path=path):
        pytest.skip('cuobjdump and nvdisasm are not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm')
    assert cuda_resources.waits(cuda_resources.instructions([slow[1]])) == [
        'multiplying<true>: a group of one wgmma instruction: it is serialised']


GROUP = '''\
\t\tFunction : _Z4fillPflf
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
'''


@pytest.mark.parametrize('before, after, problem', [
    ('', '', None),
    ('HGMMA.64x64x16.F32.BF16', 'QGMMA.64x64x32.F32.E4M3.E4M3', None),
    ('!UPT ;', '!UPT, gsb0 ;\n WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n WARPGROUP.ARRIVE ;',
     'fill: a group of one wgmma instruction: it is serialised'),
    ('!UPT ;', '!UPT ;\n WARPGROUP.DEPBAR.LE gsb0, 0x0 ;',
     'fill: WARPGROUP.DEPBAR within a group of wgmma instructions: it is serialised'),
    ('!UPT ;', '!UPT ;\n   LDL R2, [R1] ;', 'fill: LDL within a group of wgmma instructions: it is serialised'),
    ('!UPT ;', '!UPT ;\n   R2UR UR4, R2 ;', None)])
def test_a_wait_between_the_instructions_of_a_group_is_found(before, after, problem):
    assert cuda_resources.waits(GROUP.replace(before, after, 1)) == ([problem] if problem else [])


def test_without_a_disassembler_a_note_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, 'which', lambda tool, path=None: None)
    assert cuda_resources.instructions([]) == ''
    assert 'cuobjdump or nvdisasm: not found, so instructions are not checked' in capsys.readouterr().out


LAUNCHED = re.compile(r'^\| (\w+) \| `(.+)` \| (\d+) \|$', re.M)


@pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')
@pytest.mark.parametrize('step', ['seq2seq', 'transformer'])
def test_the_page_has_the_shared_memory_of_the_launches_of_a_step(step):
    table = {(file, name): int(size) for file, name, size in LAUNCHED.findall(cuda_resources.PAGE.read_text())}
    assert len(table) > 10
    found = cuda_resources.requested(launches(step, 'bf16'))
    assert found and all(0 < size <= table.get(key, 0) for key, size in found.items()), \
        'run `python -m scripts.cuda_resources --launches`'


def test_each_launched_kernel_has_a_line_with_its_registers():
    page = cuda_resources.PAGE.read_text()
    compiled = set(re.findall(r'^\| (\w+) \| `(.+)` \|(?: \d+ \|){6}$', page, re.M))
    assert {(file, name) for file, name, _ in LAUNCHED.findall(page)} <= compiled


def test_the_most_shared_memory_of_a_kernel_counts(monkeypatch):
    monkeypatch.setattr(cuda_resources, 'symbols', lambda: {16: ('gemm', DWEIGHT), 32: ('small', '_Z4fillPflf')})
    made = [Launch('dweight', '1,1,1', 128, size, False, 16) for size in (4096, 8192, 0)]
    made.append(Launch('fill', '1,1,1', 128, 0, False, 32))
    assert cuda_resources.requested(made) == {('gemm', 'dweight<0>'): 8192}


def test_the_page_has_each_kernel_of_the_sources_and_no_other():
    """By name, without namespace and template arguments.  A kernel of a header is in the rows of each file that launches it."""
    rows = {(file, name.split('::')[-1]) for file, name in
            re.findall(r'^\| (\w+) \| `([\w:]+)', cuda_resources.PAGE.read_text(), re.M)}
    kernels = {path: set(KERNEL.findall(path.read_text())) for path in (cuda_resources.ROOT / 'cuda').glob('**/*.cu*')
               if path.parent.name in ('cuda', 'common')}
    for path, names in kernels.items():
        assert len(names) == path.read_text().count('static __global__'), path
    shared = set().union(*(names for path, names in kernels.items() if path.suffix == '.cuh'))
    own = {(path.stem, name) for path, names in kernels.items() if path.suffix == '.cu' for name in names}
    assert not own - rows, 'run `python -m scripts.cuda_resources` with these files'
    assert shared <= {name for _, name in rows}
    assert not {row for row in rows - own if row[1] not in shared}, 'these kernels are gone'


def test_a_log_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match='missing: No such file or directory; give the output of a build with NVCC_EXTRA'):
        cuda_resources.main(['--log', str(tmp_path / 'missing')])
    (tmp_path / 'binary').write_bytes(b'\xff\xfe')
    with pytest.raises(UserError, match='binary: not text; give'):
        cuda_resources.main(['--log', str(tmp_path / 'binary')])
