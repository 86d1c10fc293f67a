"""`python -m pyops doctor`: what pyops finds on this machine, and a test of its kernels.

Each function returns a section: a dict of JSON values, {name: text} or {name: [texts]}.
"""
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path

from pyops import __version__
from pyops.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = re.compile('PYOPS_|CUSTOM_QUANT_|TENSOR_SAVE_|OMP_|GOMP_|CUDA_VISIBLE_DEVICES')
SECRET = 'PYOPS_SERVE_TOKEN'
SIDE = 768              # of the matrices of the timed product
REPEATS = 5


def software():
    """Versions of pyops, Python, the operating system and the required packages."""
    versions = {name: _version(name) or 'missing' for name, _ in requirements().get('', ())}
    return {'pyops': f'{__version__} in {ROOT}', 'Python': f'{platform.python_version()}, {sys.executable}',
            'system': f'{platform.system()} {platform.release()}, {platform.machine()}'} | versions


def machine():
    """CPU, its instruction set, threads, memory.  UserError if the CPU library is missing."""
    from pyops import backend
    from pyops.backend import library
    return {'CPU': f'{cpu_name()}, {os.cpu_count()} cores', 'threads': str(backend.threads()),
            'instruction set': backend.isa(), 'large products': backend.float32_isa(), 'products in bf16': backend.bf16_isa(),
            'library': f'{os.environ.get("PYOPS_LIBRARY") or library.PACKAGE / "libpyops.so"}, ABI {library.ABI_VERSION}',
            'memory': _memory(), 'GPU': _gpu()}


def cpu_name():
    """Return the CPU's name, as the operating system gives it."""
    try:
        found = re.search(r'^model name\s*:\s*(.+)$', Path('/proc/cpuinfo').read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _memory():
    try:
        sizes = dict(re.findall(r'^(\w+):\s+(\d+) kB$', Path('/proc/meminfo').read_text(), re.M))
    except OSError:
        return 'unknown'
    free, total = (int(sizes[name]) / 2**20 for name in ('MemAvailable', 'MemTotal'))
    return f'{free:.1f} of {total:.1f} GiB available'


def _gpu():
    from pyops.backend import gpu
    try:
        _, name = gpu.open_device()
    except UserError as error:
        return f'none ({error})'
    free, total = gpu.memory_info()
    return f'{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free'


def environment():
    """The environment variables that have an effect on pyops."""
    return {name: '(set)' if name == SECRET else value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)}


def data_sets():
    """Return {data set: its path, or the command to get it, or why it cannot be searched}."""
    from pyops.data import locate
    section = {}
    for name in locate.FILES:
        try:
            section[name] = str(locate.find(name) or f'not found; get it with: python -m pyops.data get {name}')
        except UserError as error:          # a bad PYOPS_DATA, which the rest of the report must not depend on
            section[name] = f'not searched: {error}'
    return section


def requirements():
    """Return {extra: [(package, least version), ...]} of the installed distribution, else of pyproject.toml.  The required
    packages are under ''.  Extras that contain other extras are left out."""
    try:
        texts = importlib.metadata.requires('pyops') or []
    except importlib.metadata.PackageNotFoundError:
        import tomllib
        project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
        texts = project['dependencies'] + [f'{text}; extra == "{extra}"'
                                           for extra, texts in project['optional-dependencies'].items() for text in texts]
    found = {}
    for text in texts:
        requirement, _, marker = text.partition(';')
        extra = re.search(r'''extra == ['"]([\w-]+)['"]''', marker)
        name, least = re.match(r'([\w.-]+(?:\[.*\])?)\s*(?:[>=]=\s*([\d.]+))?', requirement).groups()
        found.setdefault(extra[1] if extra else '', []).append((name, least or '0'))
    return {extra: listed for extra, listed in found.items() if not any(name.startswith('pyops[') for name, _ in listed)}


def extras():
    """Return {extra: versions of its packages, or the command to install them}."""
    section = {}
    target = ('-e', str(ROOT)) if (ROOT / 'pyproject.toml').exists() else ('pyops',)
    for extra, listed in requirements().items():
        versions = {name: _version(name) for name, _ in listed}
        lacking = [f'{name} {versions[name] or "missing"}' for name, least in listed
                   if versions[name] is None or _numbers(versions[name]) < _numbers(least)]
        if extra and lacking:
            command = [sys.executable, '-m', 'pip', 'install', *target[:-1], f'{target[-1]}[{extra}]']
            section[extra] = f'{", ".join(lacking)}; install with: {shlex.join(command)}'
        elif extra:
            section[extra] = ', '.join(f'{name} {version}' for name, version in versions.items())
    return section


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version):
    return [int(part) for part in re.findall(r'\d+', version.partition('+')[0])[:3]]


def self_test():
    """Return (section, whether all is right): gradients of all ops against central differences, a matrix product against
    float64, with its speed, and the weights after a short run with exact kernels."""
    import numpy as np

    from pyops import backend, exact
    from pyops.differences import check_op, every_op
    checked = every_op()
    wrong = [op.__name__ for op in checked if not check_op(op)]
    normal = np.random.default_rng(0).standard_normal
    a, b = (normal((SIDE, SIDE)).astype(np.float32) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        c = backend.product(a, b)
        times.append(time.perf_counter() - start)
    right = a.astype(np.float64) @ b.astype(np.float64)
    # rounding errors of a sum of SIDE products of standard normal numbers
    bound = SIDE * np.finfo(np.float32).eps * float(np.abs(right).max())
    error = float(np.abs(c - right).max())
    weights, has_exact = f'none, {platform.machine()} has no exact kernels', platform.machine() in ('x86_64', 'AMD64')
    if has_exact:
        found = exact.digest()[:len(exact.EXPECTED)]
        weights = f'{"right" if found == exact.EXPECTED else "WRONG"}, {found} after {exact.STEPS} steps'
        weights += '' if found == exact.EXPECTED else f', expected {exact.EXPECTED}'
    section = {'gradients': f'WRONG: {", ".join(wrong)}' if wrong else f'right for all {len(checked)} ops',
               'matrix product': f'{"right" if error <= bound else "WRONG"}, error {error:.1e} of at most {bound:.1e}; '
                                 f'{2e-9 * SIDE**3 / min(times):.0f} GFLOP/s',
               'exact weights': weights}
    return section, bool(not wrong and error <= bound and 'WRONG' not in weights)


def report():
    """Return ({section: {name: text}}, whether the self-test passed)."""
    # the environment before the library is loaded, which sets GOMP_SPINCOUNT
    found = {'software': software(), 'environment': environment(), 'machine': machine(), 'data': data_sets(),
             'extras': extras()}
    found['self-test'], is_right = self_test()
    return found, is_right


def add_flags(parser):
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.set_defaults(run=run)


def run(options):
    """Print the report.  Return the exit status: 1 if the self-test failed."""
    found, is_right = report()
    if options.json:
        import json
        print(json.dumps(found | {'is_right': is_right}, indent=1))
        return int(not is_right)
    for section, lines in found.items():
        print(f'{section}:')
        width = max(map(len, lines), default=0)
        for name, text in lines.items():
            print(f'  {name:{width}}  {text}')
        if not lines:
            print('  nothing is set')
    return int(not is_right)
