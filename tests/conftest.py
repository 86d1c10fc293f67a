"""Shared by all tests: the tree on the path, the cores of a worker, and a reasoned skip where this CPU lacks PYOPS_ISA."""
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A shell that starts us in the background has Ctrl-C ignored, and children inherit that; a handler they do not inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:               # nohup: the same for children, and we live on
    signal.signal(signal.SIGHUP, lambda *_: None)
# Modules of shared code are in tests/helpers.  Some test modules also import others, so their folders are on the path, too.
sys.path[:0] = [str(ROOT), *(str(folder) for folder in (ROOT / 'tests').iterdir() if folder.is_dir())]
# Workers of pytest-xdist share the cores; without this each would start a thread for every core.
if workers := int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 0)):
    os.environ.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // workers)))
_cache = tempfile.TemporaryDirectory(prefix='pyops-cache-')         # gone when we are
os.environ['PYOPS_CACHE'] = _cache.name

if os.environ.get('PYOPS_BACKEND') == 'gpu':
    import pyops.ndarray  # noqa: F401  from here on arrays are made on the GPU

# what -g 1 says where PYOPS_CUDA_LIBRARY=/nowhere.so
NO_CUDA = ('-g 1: /nowhere.so: the CUDA library is not built; run `make cuda` in the source tree (it needs nvcc), '
           'or train on the CPU with -g 0')

def environment_without(*names, **values):
    """The environment for a process, without `names` and without what an outer make hands to an inner one."""
    dropped = {'MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', *names}
    return {name: value for name, value in os.environ.items() if name not in dropped} | values


# what /proc/cpuinfo calls the feature that each instruction set cannot do without
FEATURE = {'generic': '', 'avx2': 'avx2', 'avx512': 'avx512dq'}


def cpu_has(isa):
    try:
        flags = Path('/proc/cpuinfo').read_text()
    except OSError:
        return isa == 'generic'
    return FEATURE[isa] in flags


def pytest_collection_modifyitems(items):
    isa = os.environ.get('PYOPS_ISA')
    if isa in FEATURE and not cpu_has(isa) and not os.environ.get('PYOPS_LIBRARY'):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f'this CPU has no {isa}: run on one that has it'))


@pytest.fixture(scope='session', autouse=True)
def all_products_are_declared():
    """A plan with a kernel of which nobody says what it does with a parameter is an error in every test."""
    from pyops import plan
    compile_ = plan.Plan._compile

    def compile_and_check(self):
        compile_(self)
        assert not self.undeclared(), '\n'.join(self.undeclared())
    plan.Plan._compile = compile_and_check
    yield
    plan.Plan._compile = compile_


@pytest.fixture(scope='session')
def torch():
    return pytest.importorskip('torch', reason='torch is not installed: pip install torch')
