"""Open the kernel libraries.  pyops.h is the only place where a prototype is written: cffi parses it for the CPU library,
and names, types and constness of every argument come from the same text, and so do the ctypes prototypes of the CUDA
library, which has those of device.h beside them.

To parse it takes longer than all else that a start needs, so what came of it is kept, beside the whole text (pyops.cache)."""
import ctypes
import functools
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import _cffi_backend  # the part of cffi that calls C; the part that parses C is imported when it is needed

from pyops import cache
from pyops.errors import UserError

ABI_VERSION = 8
PACKAGE = Path(__file__).resolve().parents[1]
REMEDY = 'run `make` in the source tree, or `pip install .`'
CUDA_REMEDY = 'run `make cuda` in the source tree (it needs nvcc), or train on the CPU with -g 0'
EMULATED_REMEDY = 'run `make emulated` in the source tree, or unset PYOPS_EMULATE_CUDA'


class Argument(NamedTuple):
    name: str
    type: str           # 'float', 'int32_t', 'int64_t', 'uint64_t', 'void': of the value, or of what is pointed to
    pointer: bool
    const: bool


class Function(NamedTuple):
    result: str         # 'pyops_status', 'int64_t', ...
    arguments: tuple[Argument, ...]


def declarations(header):
    """The part of the header that cffi can read: no preprocessor lines, no linkage block, no visibility."""
    text = re.sub(r'#ifdef __cplusplus.*?#endif', '', header, flags=re.S)
    text = re.sub(r'^\s*#.*$', '', text, flags=re.M)
    return text.replace('PYOPS_API ', '')


def functions(header):
    """name -> Function for every prototype of the header's text."""
    text = re.sub(r'/\*.*?\*/', '', declarations(header), flags=re.S)
    found = {}
    for result, name, arguments in re.findall(r'([\w ]+?[\s*]+)(pyops_\w+)\(([^)]*)\);', text):
        parsed = []
        for argument in arguments.split(','):
            match = re.fullmatch(r'\s*(const\s+)?(\w+)(\s*\*\s*|\s+)(\w+)\s*', argument)
            if match:
                const, type_, star, argument_name = match.groups()
                parsed.append(Argument(argument_name, type_, '*' in star, bool(const)))
            elif argument.strip() != 'void':
                raise ValueError(f'pyops.h: cannot read the argument {argument.strip()!r} of {name}')
        found[name] = Function(' '.join(result.split()), tuple(parsed))
    return found


class Library(NamedTuple):
    ffi: object         # cffi's FFI, which knows the types of the header
    lib: object
    functions: dict[str, Function]


def _let_idle_threads_sleep():
    """Bound how long a thread of OpenMP spins for more work (tens of microseconds, GNU's default is milliseconds): a
    spinning thread keeps a busy machine from running the one that it waits for."""
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '20000')


def _parsed(header):
    """-> cffi's FFI and the functions of the header's text."""
    key = f'{_cffi_backend.__version__}\n{Path(__file__).read_text()}\n{header}'.encode()
    if kept := cache.read('header', key):
        kept = json.loads(bytes(kept))
        return _from_tables(kept['tables']), {
            name: Function(result, tuple(Argument(*argument) for argument in arguments))
            for name, (result, arguments) in kept['functions'].items()}
    from cffi import FFI
    ffi, known = FFI(), functions(header)
    ffi.cdef(declarations(header))
    if cache.takes_files():
        import tempfile
        ffi.set_source('tables', None)          # no C source: a Python module with the types in cffi's own code
        try:
            with tempfile.TemporaryDirectory() as folder:
                tables = Path(ffi.compile(folder)).read_text()
        except OSError:
            return ffi, known
        cache.write('header', key, json.dumps({'tables': tables, 'functions': known}).encode())
    return ffi, known


def _from_tables(module):
    """The FFI of a module that cffi has written."""
    names = {}
    exec(compile(module, 'pyops.h', 'exec'), names)
    return names['ffi']


@functools.cache
def cpu():
    """The CPU library; a UserError says what to do if it is not built, does not fit or cannot obey PYOPS_ISA."""
    # PYOPS_LIBRARY: a library built another way, say with a sanitizer
    header, path = PACKAGE / 'pyops.h', Path(os.environ.get('PYOPS_LIBRARY') or PACKAGE / 'libpyops.so')
    if not path.exists() or not header.exists():
        raise UserError(f'{path}: the kernel library is not built; {REMEDY}')
    _let_idle_threads_sleep()
    ffi, known = _parsed(header.read_text())
    try:
        lib = ffi.dlopen(str(path))
        version = lib.pyops_abi_version()
    except (OSError, AttributeError) as error:          # no library, or another one
        raise UserError(f'{path}: cannot be loaded ({error}); {REMEDY}') from error
    if version != ABI_VERSION:
        raise UserError(f'{path}: ABI version {version}, this Python side wants {ABI_VERSION}; {REMEDY}')
    runs, want = ffi.string(lib.pyops_isa()).decode(), os.environ.get('PYOPS_ISA')
    if want and want != runs:
        raise UserError(f'PYOPS_ISA={want}: this CPU cannot run it or it is unknown (generic, avx2, avx512); '
                        f'unset it to let the library choose')
    return Library(ffi, lib, known)


# ---- CUDA ------------------------------------------------------------------------------------------------------------

_CTYPES = {'int32_t': ctypes.c_int32, 'int64_t': ctypes.c_int64, 'uint64_t': ctypes.c_uint64, 'float': ctypes.c_float,
           'pyops_status': ctypes.c_int, 'const char *': ctypes.c_char_p}


def is_emulated():
    """Whether PYOPS_EMULATE_CUDA asks for the kernels of the CUDA library on an emulator, which needs no GPU."""
    return os.environ.get('PYOPS_EMULATE_CUDA', '0') not in ('', '0')


class _CudaLibrary(ctypes.CDLL):
    """The CUDA library.  A function is looked up when it is first used, so a missing one is an error of that call alone."""

    def __init__(self, path, known, remedy):
        self._file, self._known, self._remedy = path.name, known, remedy
        super().__init__(str(path))

    def __getattr__(self, name):        # called once per function: ctypes stores the result as an attribute
        if name not in self._known:
            raise AttributeError(f'{name}: not a function of pyops.h or device.h')
        result, arguments = self._known[name]
        try:
            function = super().__getattr__(name)
        except AttributeError:
            raise UserError(f'{name}: {self._file} has no such function: it is older than pyops.h, or cuda/ does not implement '
                            f'it; {self._remedy}') from None
        function.restype = _CTYPES[result]
        function.argtypes = [ctypes.c_void_p if a.pointer else _CTYPES[a.type] for a in arguments]
        return function


@functools.cache
def cuda():
    """Return the CUDA library; raise a UserError with the remedy if it is not built or has another ABI version."""
    name, remedy = ('libpyops_emulated.so', EMULATED_REMEDY) if is_emulated() else ('libpyops_cuda.so', CUDA_REMEDY)
    # PYOPS_CUDA_LIBRARY: a library built another way, say with a sanitizer
    path = Path(os.environ.get('PYOPS_CUDA_LIBRARY') or PACKAGE / name)
    headers = [PACKAGE / 'pyops.h', PACKAGE / 'device.h']
    if not path.exists() or not all(header.exists() for header in headers):
        raise UserError(f'{path}: the CUDA library is not built; {remedy}')
    known = {name: function for header in headers for name, function in functions(header.read_text()).items()}
    try:
        lib = _CudaLibrary(path, known, remedy)
    except OSError as error:
        raise UserError(f'{path}: cannot be loaded ({error}); {remedy}') from error
    version = lib.pyops_abi_version()
    if version != ABI_VERSION:
        raise UserError(f'{path}: ABI version {version}, this Python side wants {ABI_VERSION}; {remedy}')
    return Library(cpu().ffi, lib, known)
