"""pytest --on: the variables that select each backend, and errors in one line; the order of tests for several workers."""
import subprocess
import sys

import backends
import pytest
from backends import BACKENDS, LOWERED, environment_of
from conftest import ROOT, environment_without, in_shares

GPU = {'PYOPS_BACKEND': 'gpu', 'PYOPS_SYNC': '1'}
EXPECTED = {'cpu': {}, 'generic': {'PYOPS_ISA': 'generic'}, 'avx2': {'PYOPS_ISA': 'avx2'}, 'avx512': {'PYOPS_ISA': 'avx512'},
            'amx_bf16': {'PYOPS_ISA': 'amx_bf16'}, 'exact': {'PYOPS_EXACT': '1'}, 'gpu': GPU,
            'emulated': GPU | {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_CHAINS': '500', 'PYOPS_EARLY_START': '1'}}


def run_pytest(*arguments, **environment):
    clean = environment_without(*backends.SELECTED, 'PYOPS_SYNC', 'PYOPS_CHAINS', 'PYOPS_EARLY_START', 'PYOPS_LIBRARY',
                                'PYOPS_CUDA_LIBRARY', 'PYTEST_XDIST_WORKER_COUNT', 'PYTEST_ADDOPTS',
                                PYTHONPATH=f'{ROOT}:{ROOT / "tests"}')
    return subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *map(str, arguments)], cwd=ROOT,
                          env=clean | environment, capture_output=True, text=True)


@pytest.mark.parametrize('name', BACKENDS)
def test_a_backend_replaces_the_variables_of_any_other(name, monkeypatch):
    monkeypatch.setattr(backends, 'cpu_has', lambda isa: True)
    others = {'PYOPS_BACKEND': 'numpy', 'PYOPS_EMULATE_CUDA': '1', 'PYOPS_ISA': 'sse', 'PYOPS_EXACT': '0', 'HOME': '/home'}
    assert environment_of(name, others) == EXPECTED[name] | {'HOME': '/home'}


def test_variables_other_than_the_backend_keep_their_values():
    given = {'PYOPS_SYNC': '0', 'PYOPS_CHAINS': '9', 'PYOPS_CUDA_LIBRARY': 'a.so'}
    assert environment_of('emulated', given).items() >= given.items()


def test_avx512_and_amx_run_the_lowered_library_on_a_cpu_without_them(monkeypatch):
    monkeypatch.setattr(backends, 'cpu_has', lambda isa: isa != 'avx512')
    assert environment_of('avx512', {}) == {'PYOPS_ISA': 'avx512', 'PYOPS_LIBRARY': str(LOWERED)}
    assert [target for _, target in backends.libraries('avx512', environment_of('avx512', {}))] == ['lowered']
    monkeypatch.setattr(backends, 'cpu_has', lambda isa: isa != 'amx_bf16')
    assert environment_of('amx_bf16', {}) == {'PYOPS_ISA': 'amx_bf16', 'PYOPS_LIBRARY': str(LOWERED)}


@pytest.mark.parametrize('workers', [0, 1])
def test_the_tests_and_their_workers_run_on_the_backend(workers, tmp_path):
    probe = tmp_path / 'test_probe.py'
    probe.write_text('from pyops import backend\ndef test_probe():\n    assert backend.isa() == "generic"\n')
    done = run_pytest('-p', 'conftest', '--on', 'generic', '-n', workers, probe)
    assert done.returncode == 0 and '1 passed' in done.stdout, done.stdout + done.stderr
    probe.write_text('import os\ndef test_probe():\n    assert os.environ["PYOPS_ISA"] == "avx2"\n')
    done = run_pytest('-p', 'conftest', '--on', 'generic', '-n', workers, probe)
    assert done.returncode == 1 and "'generic' == 'avx2'" in done.stdout


@pytest.mark.parametrize('name,variable,target', [('cpu', 'PYOPS_LIBRARY', 'cpu'), ('gpu', 'PYOPS_CUDA_LIBRARY', 'cuda'),
                                                  ('emulated', 'PYOPS_CUDA_LIBRARY', 'emulated')])
def test_a_missing_library_is_one_line_with_the_command_that_builds_it(name, variable, target):
    done = run_pytest('--on', name, 'tests/ops', **{variable: '/nowhere.so'})
    assert done.returncode == 4 and done.stdout == ''
    assert done.stderr == f'ERROR: --on {name}: /nowhere.so is missing: run `make {target}`\n\n'


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path):
    library = tmp_path / 'library.so'
    library.write_text('not a library')
    done = run_pytest('--on', 'cpu', 'tests/ops', PYOPS_LIBRARY=str(library))
    assert done.returncode == 4 and done.stderr.startswith(f'ERROR: --on cpu: {library}: cannot be loaded (')
    assert len(done.stderr.splitlines()) == 2, 'the error, and an empty line of pytest'


@pytest.mark.parametrize('count', [0, 4, 8, 9, 10])
def test_each_worker_begins_with_its_share_of_the_slow_tests(count):
    slow, others = [-1, -2, -3, -4], [*range(count)]
    ordered = in_shares(slow, others, 3)
    assert sorted(ordered) == sorted(slow + others) and [n for n in ordered if n >= 0] == others
    if count >= 8:
        third = len(ordered) // 3                       # pytest-xdist gives the remainder to the last workers
        second = third + (len(ordered) - third) // 2
        assert ordered[:2] == [-1, -4] and ordered[third] == -2 and ordered[second] == -3
