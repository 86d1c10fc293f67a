"""Shared by all tests: import path, signal handlers, threads per worker, the options --on and --slow, fixtures."""
import fcntl
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# Collecting tests makes hundreds of thousands of objects, and no garbage: see pytest_collection_finish.
gc.disable()
ROOT = Path(__file__).resolve().parents[1]
# A shell ignores SIGINT in background jobs, and children inherit that.  They do not inherit a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:               # nohup: children get the default, this process continues
    signal.signal(signal.SIGHUP, lambda *_: None)
sys.path[:0] = [str(ROOT), str(ROOT / 'tests/helpers')]
import backends  # noqa: E402
import draws  # noqa: E402
from browsing import CHROMIUM  # noqa: E402

# Workers of pytest-xdist share the cores.  Without this, each would start a thread per core.
if workers := int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 0)):
    os.environ.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // workers)))
_cache = tempfile.TemporaryDirectory(prefix='pyops-cache-')         # deleted when this process exits
os.environ['PYOPS_CACHE'] = _cache.name

# the message of -g 1 with PYOPS_CUDA_LIBRARY=/nowhere.so
NO_CUDA = ('-g 1: /nowhere.so: the CUDA library is not built; run `make cuda` in the source tree (it needs nvcc), '
           'or train on the CPU with -g 0')
has_mnist = pytest.mark.skipif(not os.path.isdir(os.path.join(os.environ.get('PYOPS_DATA', '/nowhere'), 'mnist')),
                               reason='needs MNIST: set PYOPS_DATA to a folder with mnist/')


def environment_without(*names, **values):
    """Return the environment for a process, without `names` and without the variables that make passes to an inner make."""
    dropped = {'MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', *names}
    return {name: value for name, value in os.environ.items() if name not in dropped} | values


def made_once(tmp_path_factory, name, make):
    """Return a folder that make(folder) has filled, the same for all workers of pytest-xdist.  `make` runs in one of them."""
    base = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        base = base.parent
    folder, done = base / name, base / f'{name}.done'
    with open(base / f'{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)       # of a worker in which `make` failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def in_shares(slow, others, workers):
    """Return all tests in an order in which each worker begins with its share of the slow ones.

    pytest-xdist first gives each worker a contiguous part of the list.  If one worker had all slow tests, the others would wait
    for it at the end.
    """
    ordered, others, total = [], iter(others), len(slow) + len(others)
    for worker in range(workers):
        share, part = slow[worker::workers], (total - len(ordered)) // (workers - worker)
        ordered += [*share, *itertools.islice(others, max(0, part - len(share)))]
    return ordered


def pytest_addoption(parser):
    parser.addoption('--on', choices=backends.BACKENDS, metavar='BACKEND',
                     help=f'run the tests on {", ".join(backends.BACKENDS)} (cpu: the best instruction set of this machine). '
                          'Builds nothing. Default: as PYOPS_BACKEND and PYOPS_ISA select')
    parser.addoption('--slow', action='store_true', help='also run the tests marked slow, as `make test-all` does')
    parser.addoption('--write-passed', metavar='FILE', type=Path, help='write the names of the tests that passed to FILE')
    parser.addoption('--skip-passed', metavar='FILE', type=Path, help='do not run the tests named in FILE')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: builds libraries or takes minutes; runs with --slow')
    if name := config.getoption('--on'):
        backends.select(name)
    if os.environ.get('PYOPS_BACKEND') == 'gpu':
        import pyops.ndarray  # noqa: F401  selects the GPU for new arrays


def pytest_collection_modifyitems(config, items):
    if not config.getoption('--slow'):
        for item in items:
            if item.get_closest_marker('slow'):
                item.add_marker(pytest.mark.skip(reason='slow: run pytest with --slow, or `make test-all`'))
    if names := config.getoption('--skip-passed'):
        passed = set(names.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    slow = [item for item in items if item.get_closest_marker('slow')]
    others = [item for item in items if not item.get_closest_marker('slow')]
    items[:] = in_shares(slow, others, int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 1)))


def pytest_collection_finish(session):
    """Note the generators of modules; leave tests out of garbage collection, which takes a fifth of the time of short ones."""
    for module in {item.module for item in session.items}:
        draws.note(module)
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    draws.begin(item.module)


def pytest_sessionfinish(session):
    config = session.config
    if (path := config.getoption('--write-passed')) and not hasattr(config, 'workerinput'):     # not in a worker of xdist
        stats = config.pluginmanager.get_plugin('terminalreporter').stats
        path.write_text(''.join(f'{report.nodeid}\n' for report in stats.get('passed', []) if report.when == 'call'))


@pytest.fixture(scope='session', autouse=True)
def all_products_are_declared():
    """Make it an error in every test if a plan has a kernel without a note about a parameter that it takes."""
    from pyops import plan
    compile_ = plan.Plan._compile

    def compile_and_check(self):
        compile_(self)
        assert not self.undeclared(), '\n'.join(self.undeclared())
    plan.Plan._compile = compile_and_check
    yield
    plan.Plan._compile = compile_


@pytest.fixture(scope='module')
def new_objects():
    """Leave the objects that exist now out of collections and of gc.get_objects(): both take seconds with those of PyTorch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope='session')
def torch():
    return pytest.importorskip('torch', reason='torch is not installed: pip install torch')


@pytest.fixture(scope='module')
def browser():
    playwright = pytest.importorskip('playwright.sync_api', reason='playwright is not installed: pip install playwright')
    if not os.path.exists(CHROMIUM):
        pytest.skip(f'{CHROMIUM} is not installed: apt install chromium')
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu'], headless=True)
        yield browser
        browser.close()


@pytest.fixture(scope='module')
def device():
    """The GPU.  If new arrays are on the CPU, the emulated one, opened for the tests of one module."""
    from places import ON_GPU

    import pyops
    from pyops import backend, ndarray
    from pyops.backend import gpu, library
    from pyops.errors import UserError
    caches = library.cuda, gpu.open_device, ndarray.gpu
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv('PYOPS_EMULATE_CUDA', '1')
            for cache in caches:
                cache.cache_clear()
        try:
            yield pyops.gpu()
        except UserError as error:
            pytest.skip(f'no GPU and no emulated library: run `make emulated` ({error})')
    if not ON_GPU:
        backend.set_gpu(None)
        for cache in caches:
            cache.cache_clear()
