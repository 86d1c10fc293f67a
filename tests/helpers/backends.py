"""The backends of `pytest --on`: the environment variables that select each, and the libraries they need."""
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOWERED = ROOT / 'build/lowered/libpyops.so'        # AVX-512 kernels compiled for AVX2, and AMX emulated
SELECTED = 'PYOPS_BACKEND', 'PYOPS_EMULATE_CUDA', 'PYOPS_ISA', 'PYOPS_EXACT'
ON_GPU = {'PYOPS_BACKEND': 'gpu'}
BACKENDS = {'cpu': {}, **{isa: {'PYOPS_ISA': isa} for isa in ('generic', 'avx2', 'avx512', 'amx_bf16')},
            'exact': {'PYOPS_EXACT': '1'}, 'emulated': ON_GPU | {'PYOPS_EMULATE_CUDA': '1'}, 'gpu': ON_GPU}
# used unless the variable is set.  PYOPS_SYNC: the call that caused an error raises it.  PYOPS_EARLY_START: the emulator checks
# that a kernel waits for the last one
DEFAULTS = {'emulated': {'PYOPS_SYNC': '1', 'PYOPS_EARLY_START': '1', 'PYOPS_CHAINS': '500'}, 'gpu': {'PYOPS_SYNC': '1'}}
# library, make target
CUDA_LIBRARIES = {'emulated': ('pyops/libpyops_emulated.so', 'emulated'), 'gpu': ('pyops/libpyops_cuda.so', 'cuda')}
# the flag in /proc/cpuinfo that each instruction set requires
FEATURE = {'generic': '', 'avx2': 'avx2', 'avx2_vnni': 'avx_vnni', 'avx512': 'avx512dq', 'avx512_vnni': 'avx512_vnni',
           'avx512_bf16': 'avx512_bf16', 'amx_bf16': 'amx_bf16', 'amx_int8': 'amx_int8'}


def cpu_has(isa):
    try:
        flags = Path('/proc/cpuinfo').read_text()
    except OSError:
        return isa == 'generic'
    return FEATURE[isa] in flags


def environment_of(name, environment):
    """Return `environment` with the variables that select a backend."""
    result = {variable: value for variable, value in environment.items() if variable not in SELECTED} | BACKENDS[name]
    for variable, value in DEFAULTS.get(name, {}).items():
        result.setdefault(variable, value)
    if name in ('avx512', 'amx_bf16') and not cpu_has(name):
        result.setdefault('PYOPS_LIBRARY', str(LOWERED))        # the same code, compiled for AVX2; AMX is emulated
    return result


def select(name):
    """Set the variables of a backend in this process, before pyops reads them.  pytest.UsageError if a library is missing."""
    selected = environment_of(name, os.environ)
    for path, target in libraries(name, selected):
        if not path.exists():
            raise pytest.UsageError(f'--on {name}: {path} is missing: run `make {target}`')
    for variable in SELECTED:
        os.environ.pop(variable, None)
    os.environ.update(selected)
    from pyops.backend import library
    from pyops.errors import UserError
    try:
        library.cpu()
        if name in CUDA_LIBRARIES:
            import pyops.ndarray  # noqa: F401  selects the GPU for new arrays
    except UserError as error:
        raise pytest.UsageError(f'--on {name}: {error}') from error


def libraries(name, environment):
    """Return (path, make target) of the libraries that a backend loads."""
    path = Path(environment.get('PYOPS_LIBRARY') or ROOT / 'pyops/libpyops.so')
    found = [(path, 'lowered' if path == LOWERED else 'cpu')]
    if name in CUDA_LIBRARIES:
        file, target = CUDA_LIBRARIES[name]
        found.append((Path(environment.get('PYOPS_CUDA_LIBRARY') or ROOT / file), target))
    return found
