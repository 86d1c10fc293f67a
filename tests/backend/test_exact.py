"""Exact kernels (pyops.set_exact): the same bits on every instruction set, for any number of threads and with any libm."""
import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from arrays import normal
from backends import cpu_has
from conftest import ROOT, environment_without
from places import ON_GPU

import pyops
from pyops import backend, exact
from pyops.backend import HOST

pytestmark = [
    pytest.mark.skipif(platform.machine() != 'x86_64', reason='exact kernels need x86-64: run on a machine that has it'),
    pytest.mark.skipif(ON_GPU, reason='a GPU has no exact kernels: run with --on cpu')]
ISAS = 'generic', 'avx2', 'avx512'
# Without the variants of functions for newer CPUs, glibc and numpy compute as on a CPU with SSE2 alone.
OLD = {'GLIBC_TUNABLES': 'glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4',
       'NPY_DISABLE_CPU_FEATURES': 'AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX2 FMA3'}


@pytest.fixture(autouse=True)
def settings():
    before, precision = HOST.exact, HOST.precision
    yield
    HOST.exact = False
    HOST.precision = precision
    HOST.exact = before


def run(*arguments, isa, threads=1, is_exact=True, **environment):
    """Return the output of a Python process on an instruction set."""
    clean = environment_without('PYOPS_LIBRARY', 'PYOPS_BACKEND', 'PYOPS_ISA', 'PYOPS_EXACT', **environment,
                                PYOPS_ISA=isa, PYOPS_EXACT=str(int(is_exact)), OMP_NUM_THREADS=str(threads))
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, env=clean, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bits(isa, threads, is_exact=True):
    found = json.loads(run(ROOT / 'tests/helpers/exact_bits.py', isa=isa, threads=threads, is_exact=is_exact))
    assert found['isa'] == isa and found['is_exact'] == is_exact
    return found['results']


def test_all_kernels_give_the_same_bits_on_every_instruction_set():
    generic, default = bits('generic', 2), bits('avx2' if cpu_has('avx2') else 'generic', 1, is_exact=False)
    assert len(generic) > 700
    for number, isa in enumerate(isa for isa in ISAS[1:] if cpu_has(isa)):
        found = bits(isa, number + 1)
        assert found.keys() == generic.keys()
        assert not (differ := [name for name, value in found.items() if value != generic[name]]), (isa, differ)
    if cpu_has('avx2'):                 # otherwise this test would pass with kernels that are not exact, too
        assert sum(value != generic[name] for name, value in default.items()) > 300


@pytest.mark.parametrize('isa', [
    pytest.param(isa, marks=pytest.mark.skipif(not cpu_has(isa), reason=f'no {isa}: run on a CPU with it'))
    for isa in ISAS])
@pytest.mark.parametrize('threads,environment', [(1, {}), (2, {}), (2, OLD)], ids=['1', '2', 'old'])
def test_every_machine_trains_the_weights_of_the_readme(isa, threads, environment):
    code = 'from pyops import backend, exact; print(backend.isa(), exact.digest())'
    used, found = run('-c', code, isa=isa, threads=threads, is_exact=False, **environment).split()
    assert used == isa and found.startswith(exact.EXPECTED) and len(exact.EXPECTED) == 16
    for page in 'README.md', 'docs/determinism.md':
        assert exact.EXPECTED in (ROOT / page).read_text(), page


def test_the_weights_depend_on_no_state_of_the_process():
    first = exact.digest(3)
    pyops.seed(5)
    pyops.nn.Linear(3, 4)
    pyops.set_exact()
    assert exact.digest(3) == first != exact.digest(4) and HOST.exact
    pyops.seed(0)


def test_exact_kernels_can_be_chosen_and_left():
    rng = np.random.default_rng(0)
    a, b = normal(rng, 50, 300), normal(rng, 300, 40)
    results = []
    for is_exact in (True, False, True):
        pyops.set_exact(is_exact)
        assert HOST.exact == is_exact
        results.append(backend.product(a, b))
    assert (results[0] == results[2]).all()
    if backend.isa() != 'generic':
        assert (results[0] != results[1]).any()


def test_bfloat16_and_exact_kernels_exclude_each_other():
    HOST.exact = True
    with pytest.raises(ValueError, match=r'^set_precision: .*=2, expected 0 with exact kernels, or set_exact\(0\) first'):
        HOST.precision = 'bf16'
    assert HOST.exact and HOST.precision == 'fp32'
    HOST.exact = False
    HOST.precision = 'bf16'
    with pytest.raises(ValueError, match=r'^set_exact: exact=1, expected 0 with bfloat16, or set_precision\(0\) first$'):
        pyops.set_exact()
    assert not HOST.exact and HOST.precision == 'bf16'


def test_another_value_is_refused():
    ffi, lib, _ = backend.library.cpu()
    assert lib.pyops_set_exact(2) == 1
    assert ffi.string(lib.pyops_last_error()).decode() == 'set_exact: exact=2, expected 0 or 1'
    environment = os.environ | {'PYOPS_EXACT': 'yes'}
    done = subprocess.run([sys.executable, '-m', 'mnist.train'], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr == (
        'mnist.train: error: PYOPS_EXACT=yes: expected 1, for the same bits on every instruction set, or 0; unset it\n')
