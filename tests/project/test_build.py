"""What is shipped: a wheel with the library in it that works away from its source tree, and the targets of make."""
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, environment_without

DEVELOPMENT = {'bench', 'tests'}        # packages and folders that are not installed
PARTS = ('Makefile', 'MANIFEST.in', 'LICENSE', 'README.md', 'pyproject.toml', 'setup.py', 'csrc', 'cuda', 'scripts')
SOURCES = '*.py', '*.html', '*.css', '*.js', 'py.typed'         # of a package
BUILT = ('*.so', '*.o', '__pycache__', '*.egg-info')


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


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """A copy of the tree in which nothing is built, under a path with a space."""
    if not shutil.which('make') or not any(map(shutil.which, ('gcc', 'clang', 'cc'))):
        pytest.skip('make and a C compiler are needed')
    tree = tmp_path_factory.mktemp('source tree')
    for name in (*PARTS, *{path.parts[0] for path in packages()}):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*BUILT))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    (tree / 'pyops/pyops.h').unlink(missing_ok=True)
    return tree


@pytest.fixture(scope='module')
def wheel(tree):
    pytest.importorskip('setuptools', '77', reason="setuptools is not installed: pip install 'setuptools>=77'")
    pytest.importorskip('pip', reason='pip is not installed')
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check']
    run(*pip, 'wheel', '--no-build-isolation', '--no-deps', '--no-index', '-w', 'dist', '.', cwd=tree)
    (wheel,) = (tree / 'dist').glob('*.whl')
    return wheel


def test_the_wheel_holds_the_library_its_header_and_every_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read('pyops/pyops.h') == (ROOT / 'csrc/pyops.h').read_bytes()
        assert not [name for name in names if '.data/' in name], 'the packages lie at the root'
        assert archive.read('pyops/libpyops.so')[:4] in (b'\x7fELF', b'\xcf\xfa\xed\xfe')
    assert len(packages()) >= 6
    for package in packages():
        for source in (path for kind in SOURCES for path in (ROOT / package).rglob(kind)):
            assert source.relative_to(ROOT).as_posix() in names, 'see packages and package-data in pyproject.toml'
    assert not [name for name in names if name.split('/')[0] in DEVELOPMENT or name.endswith(('.o', '.c'))]


def test_the_wheel_is_for_any_python_3_of_this_platform(wheel):
    machine = re.escape(platform.machine().lower())
    assert re.fullmatch(rf'pyops-[\d.]+-py3-none-(linux|macosx)\w*_({machine}|universal2)\.whl', wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith('.dist-info/WHEEL')]
        assert b'Root-Is-Purelib: false' in archive.read(name)


def test_what_was_installed_trains_and_serves_away_from_the_source_tree(wheel, tmp_path):
    target, elsewhere = tmp_path / 'target', tmp_path / 'elsewhere'
    elsewhere.mkdir()
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--disable-pip-version-check',
        '--target', target, wheel, cwd=elsewhere)

    def python(*arguments):
        return run(sys.executable, *arguments, cwd=elsewhere, PYTHONPATH=str(target)).stdout
    where = python('-c', 'import pyops, seq2seq; from pyops.backend import library; library.cpu()\n'
                         'print(pyops.__file__, seq2seq.__file__, library.PACKAGE, sep="\\n")')
    assert all(Path(line).is_relative_to(target.resolve()) for line in where.splitlines()), where
    small = ['--embedding', '16', '--hidden', '16']
    out = python('-m', 'seq2seq.train', '-f', 'embedded', '-t', '1', '-e', '1', '-c', 'ckpt', *small)
    assert 'epoch 1 loss : ' in out and list((elsewhere / 'ckpt').glob('checkpoint_*_1.safetensors'))
    text = python('-m', 'seq2seq.translate', '-c', 'ckpt', 'I sleep.')
    assert text.count('\n') == 1
    load = 'import pyops; print(pyops.load("ckpt").translate("I sleep."))'
    assert python('-c', load) == text
    assert 'fra-eng' in python('-m', 'pyops.data', 'list')


def test_a_source_archive_holds_what_make_needs_and_not_what_it_makes(tree, wheel):
    """Behind the wheel, so that there is something built to leave out."""
    run(sys.executable, '-c', "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=tree)
    (archive,) = (tree / 'dist').glob('*.tar.gz')
    with tarfile.open(archive) as file:
        names = {name.partition('/')[2] for name in file.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for top in ('csrc', 'cuda')
               for path in (ROOT / top).rglob('*') if path.is_file()}
    sources |= {path.relative_to(ROOT).as_posix() for package in packages() for kind in SOURCES
                for path in (ROOT / package).glob(kind)}
    assert len(sources) > 10 and names >= sources | {'Makefile', 'setup.py', 'pyproject.toml'}
    assert not names & {'pyops/libpyops.so', 'pyops/pyops.h', 'pyops/device.h'}
    assert not [name for name in names if name.endswith('.o')]


def test_make_with_clang(tree):
    if not shutil.which('clang'):
        pytest.skip('clang is not installed')
    trial = ['clang', '-fopenmp', '-x', 'c', '-', '-o', os.devnull]
    if subprocess.run(trial, input=b'int main(void) { return 0; }', capture_output=True).returncode:
        pytest.skip("clang's OpenMP library is not installed: install libomp")
    library = tree / 'build/clang/libpyops.so'
    run('make', 'cpu', 'CC=clang', 'BUILD=build/clang', f'LIBRARY={library.relative_to(tree)}', cwd=tree)
    run(sys.executable, '-c', 'from pyops import backend; backend.isa()', cwd=tree, PYOPS_LIBRARY=str(library))


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
