"""Write the registers, shared memory and spills of every CUDA kernel into docs/cuda_resources.md.  Requires nvcc, but no GPU.

    python -m scripts.cuda_resources               compile for sm_80 and sm_90a and rewrite the table; takes minutes
    python -m scripts.cuda_resources gemm optim    only these files; the lines of the others stay
    python -m scripts.cuda_resources --log FILE    read the compiler's output from FILE instead
    python -m scripts.cuda_resources --check gemm  compile, and compare with the table instead of writing it
    python -m scripts.cuda_resources --launches    the table of shared memory that kernels request at launch

--launches requires the emulated library (make emulated) and no nvcc.  If cuobjdump is there, the instructions of sm_90a are
checked, too.  Exit status 2 if a kernel spills registers, or the compiler serialises wgmma instructions; with --check also if a
kernel uses local memory or more registers than on the page, in units of 8.
"""
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'scripts.cuda_resources'
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'cuda_resources.md'
BUILD = ROOT / 'build' / 'resources'
ARCHITECTURES = 'sm_80', 'sm_90a'
EMULATED = ROOT / 'pyops' / 'libpyops_emulated.so'

OBJECT = re.compile(r'^nvcc \S*/(\w+)\.o$')         # printed by make before the output for an object
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
SPILLS = re.compile(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads')
SERIALISED = re.compile(r'\(C75\d\d\)|wgmma.*serialized')       # C7511 and others; C7517: a wait is injected
USED = re.compile(r'Used (\d+) registers(?:.*?(\d+) bytes smem)?')
# Instructions that only address arithmetic would not have: of memory, of barriers, and calls.
BETWEEN = re.compile(r'\s((?:LD|ST|ATOM|RED)\w*|BAR|MEMBAR|WARPSYNC|CALL|WARPGROUP\.DEPBAR)\b')
FUNCTION = re.compile(r'Function : (\w+)')            # of cuobjdump
LINE = re.compile(r'^\| (\w+) \| `(.+)` \| (\d*) \| \d* \| \d* \| (\d*) \| \d* \| \d* \|$', re.M)     # of the table
FILE = re.compile(r'_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}')     # nvcc's name of a file's anonymous namespace


class Kernel(NamedTuple):
    file: str               # without its suffix
    name: str               # with template arguments, without function arguments
    architecture: str
    registers: int
    shared: int             # static shared memory, bytes; more may be requested at launch
    local: int              # local memory of a thread, bytes: what it spills, and arrays indexed by variables
    stored: int             # spill stores, bytes
    loaded: int             # spill loads, bytes


def compiled(files=()):
    """Return the output of a build of the whole library, or of some files, with ptxas -v."""
    targets = [f'{BUILD}/{path.relative_to(ROOT / "cuda").with_suffix(".o")}' for path in map(_source, files)]
    if not shutil.which('nvcc'):
        raise UserError('nvcc: not found; install the CUDA toolkit, or give the output of a build with --log')
    shutil.rmtree(BUILD, ignore_errors=True)            # an object that is up to date prints nothing
    command = ['make', '-O', *(targets or ['cuda']), 'CUDA_ARCH=80;90a', 'NVCC_EXTRA=-Xptxas -v', f'CUDA_BUILD={BUILD}',
               f'CUDA_LIBRARY={BUILD}/libpyops_cuda.so']
    environment = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MAKELEVEL')}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f'{" ".join(command)}: {done.stdout.strip().splitlines()[-1]}')
    return done.stdout


def _source(name):
    """Return the path of a file of cuda/ or cuda/common/ from its name without suffix."""
    paths = [path for path in (ROOT / 'cuda' / f'{name}.cu', ROOT / 'cuda' / 'common' / f'{name}.cu') if path.exists()]
    if not paths:
        raise UserError(f'{name}: not found in cuda/ and cuda/common/; give the name of a .cu file without its suffix')
    return paths[0]


def readable(names):
    """Return C++ symbols as text, without function arguments and anonymous namespaces."""
    if not shutil.which('c++filt'):
        raise UserError('c++filt: not found; install binutils')
    text = subprocess.run(['c++filt'], input='\n'.join(names), capture_output=True, text=True, check=True).stdout
    return [_without_arguments(line.replace('(anonymous namespace)::', '')) for line in text.splitlines()]


def _without_arguments(name):
    """'void f<(P)1, int>(T, int)' -> 'f<1, int>'"""
    name = re.sub(r'\((?:\w|::)+\)(-?\d)', r'\1', FILE.sub('', name).removeprefix('void '))
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == '<') - (letter == '>')
        if letter == '(' and not depth:
            return name[:i].removeprefix('::')
    return name.removeprefix('::')


def log_of(path):
    """Return the text of the file.  UserError if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: {error.strerror if isinstance(error, OSError) else "not text"}; give the output of a build '
                        'with NVCC_EXTRA="-Xptxas -v"') from error


def kernels(log):
    """Yield the Kernels in the output of ptxas -v, in its order."""
    entries, file = [], '?'
    entry = spills = None
    for line in log.splitlines():
        if match := OBJECT.search(line.strip()):
            file = match[1]
        elif match := ENTRY.search(line):
            entry = match.groups()
        elif match := SPILLS.search(line):
            spills = [int(text) for text in match.groups()]
        elif entry and (match := USED.search(line)):
            if spills is None:
                raise UserError(f'{entry[0]}: no line about spills; expected the output of ptxas -v')
            entries.append((file, *entry, int(match[1]), int(match[2] or 0), *spills))
            entry = spills = None
    if not entries:
        raise UserError('no kernel in the output of the compiler; expected the output of nvcc -Xptxas -v')
    for name, (file, _, *rest) in zip(readable([name for _, name, *_ in entries]), entries, strict=True):
        yield Kernel(file, name, *rest)


def kept_lines(page, files):
    """Return the lines of the table on a page that belong to other files."""
    table = page.read_text().partition('<!-- /resources -->')[0]
    rows = [line for line in table.splitlines() if line.startswith('| ') and '`' in line]
    return [line for line in rows if line.split('|')[1].strip() not in files]


def table(found, kept=()):
    """Return the Markdown table: a line per kernel, with its figures on both architectures.  kept: lines of other files."""
    by_name = {}
    for kernel in found:
        by_name.setdefault((kernel.file, kernel.name), {})[kernel.architecture] = kernel
    head = ['| file | kernel | ' + ' | '.join(f'registers, {arch} | shared | spills' for arch in ARCHITECTURES) + ' |',
            '|---|---' + '|---:' * 3 * len(ARCHITECTURES) + '|']
    lines = list(kept)
    for (file, name), kernels_of in sorted(by_name.items()):
        cells = []
        for arch in ARCHITECTURES:
            kernel = kernels_of.get(arch)
            cells += [kernel.registers, kernel.shared, kernel.stored] if kernel else ['', '', '']
        lines.append(f'| {file} | `{name}` | ' + ' | '.join(map(str, cells)) + ' |')
    lines.sort(key=lambda line: line.split('|')[1:3])
    return '\n'.join(['', *head, *lines, '', ''])


def problems(found, log):
    """Return a list of lines: kernels that spill, and warnings about wgmma."""
    bad = [f'{_named(kernel)}: spills {kernel.stored or kernel.loaded} bytes' for kernel in found
           if kernel.stored or kernel.loaded]
    return bad + [line.strip() for line in log.splitlines() if SERIALISED.search(line)]


def _named(kernel):
    return f'{kernel.file}: {kernel.name} ({kernel.architecture})'


def _units(registers):
    """Return how many units of 8 registers a thread gets: a device allocates no smaller part."""
    return -(-registers // 8)


def beyond(found, page):
    """Return a list of lines: kernels with local memory that is not spilled, and those that a page has otherwise: with fewer
    units of registers, or not at all; or that it has alone."""
    written, files = {}, {kernel.file for kernel in found}
    for file, name, *registers in LINE.findall(page.read_text()):
        if file in files:
            written |= {(file, name, architecture): int(count)
                        for architecture, count in zip(ARCHITECTURES, registers, strict=True) if count}
    bad = []
    for kernel in found:
        if kernel.local and not kernel.stored:
            bad.append(f'{_named(kernel)}: {kernel.local} bytes of local memory: index its arrays by constants')
        allowed = written.pop((kernel.file, kernel.name, kernel.architecture), 0)
        if _units(kernel.registers) > _units(allowed):
            bad.append(f'{_named(kernel)}: {kernel.registers} registers, on the page {allowed}: if that is wanted, update it '
                       f'with python -m {PROGRAM} {kernel.file}')
    return bad + [f'{file}: {name} ({architecture}): on the page, but not in the build: update the page with '
                  f'python -m {PROGRAM} {file}' for file, name, architecture in written]


def tools():
    """Return PATH and the folders where pip installs NVIDIA's tools."""
    return os.pathsep.join([os.environ.get('PATH', ''), *map(str, Path(sysconfig.get_path('purelib')).glob('nvidia/*/bin'))])


def instructions(objects):
    """Return the SASS for sm_90a of object files; '', with a note, without cuobjdump."""
    path = tools()
    if not shutil.which('cuobjdump', path=path) or not shutil.which('nvdisasm', path=path):
        print('cuobjdump or nvdisasm: not found, so instructions are not checked; both are in the CUDA toolkit, or: '
              'pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm')
        return ''
    text = ''
    for file in sorted(objects):
        command = [shutil.which('cuobjdump', path=path), '-sass', '-arch', 'sm_90a', str(file)]
        done = subprocess.run(command, env=os.environ | {'PATH': path}, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f'cuobjdump {file}: {" ".join(done.stderr.split())}')
        text += done.stdout
    return text


def waits(sass):
    """Return a line for each kernel that waits, or accesses memory, within a group of wgmma instructions.

    SASS marks the last HGMMA, or QGMMA for FP8, of a group with gsb0.  A compiler that serialises ends a group after each one
    and waits for it.  No kernel has a group of one instruction otherwise: a group multiplies at least 32 columns, 16 at a time.
    """
    kernel, length, bad = '?', 0, {}
    for line in sass.splitlines():
        if match := FUNCTION.search(line):
            kernel, length = match[1], 0
        elif 'GMMA.' in line:
            length += 1
            if 'gsb0' in line:
                if length == 1:
                    bad.setdefault(kernel, 'a group of one wgmma instruction')
                length = 0
        elif length and (match := BETWEEN.search(line)):
            bad.setdefault(kernel, f'{match[1]} within a group of wgmma instructions')
    return [f'{name}: {what}: it is serialised' for name, what in zip(readable(bad), bad.values(), strict=True)]


# ---- shared memory that a launch requests -----------------------------------------------------------------------------

def symbols(library=EMULATED):
    """Return {address: (file without its suffix, symbol)} of the functions of a library that is not stripped."""
    if not shutil.which('nm'):
        raise UserError('nm: not found; install binutils')
    lines = subprocess.run(['nm', '-a', '--no-sort', str(library)], capture_output=True, text=True, check=True).stdout
    file, found = '?', {}
    for address, kind, name in re.findall(r'^([0-9a-f]+) (\w) (.*)$', lines, re.M):
        if kind == 'a':                                 # of the symbols that follow
            file = Path(name).stem
        else:
            found[int(address, 16)] = file, name
    return found


def requested(launches):
    """Return {(file, kernel): bytes}: the most dynamic shared memory of a block in these bench.launches.Launches, if any."""
    most = {}
    for launch in launches:
        if launch.shared:
            most[launch.address] = max(launch.shared, most.get(launch.address, 0))
    known = symbols()
    names = readable([known[address][1] for address in most])
    found = {}
    for (address, size), name in zip(most.items(), names, strict=True):
        key = known[address][0], name
        found[key] = max(size, found.get(key, 0))
    return found


def launch_table():
    """Return the Markdown table of requested() for the steps of bench.launches."""
    from bench.launches import PRECISIONS, STEPS, launches
    found = requested([launch for step in STEPS for precision in PRECISIONS for launch in launches(step, precision)])
    lines = [f'| {file} | `{name}` | {size} |' for (file, name), size in sorted(found.items())]
    return '\n'.join(['', '| file | kernel | bytes |', '|---|---|---:|', *lines, '', ''])


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Write the table of registers and spills of CUDA kernels.')
    p.add_argument('files', nargs='*', metavar='NAME', help='a .cu file without its suffix (default: all)')
    p.add_argument('--log', type=Path, metavar='FILE', help='output of a build with NVCC_EXTRA="-Xptxas -v" (default: build)')
    p.add_argument('--objects', type=Path, metavar='FOLDER', help='the objects of that build, to check their instructions, too')
    p.add_argument('--check', action='store_true', help='write nothing; exit status 2 also if a kernel uses local memory, or '
                   'more registers than on the page')
    p.add_argument('--launches', action='store_true',
                   help='update the table of shared memory at launch instead; requires the emulated library, not nvcc')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help='page to update (default docs/cuda_resources.md)')
    args = p.parse_args(argv)
    if args.launches:
        if args.files or args.log or args.check:
            p.error('--launches: counts the kernels of all files; give it without NAME, --log and --check')
        update(args.page, 'launches', launch_table(), f'python -m {PROGRAM} --launches')
        return
    if args.objects and not args.log:
        p.error('--objects: only with --log')
    log = log_of(args.log) if args.log else compiled(args.files)
    found = [kernel for kernel in kernels(log) if not args.files or kernel.file in args.files]
    if missing := set(args.files) - {kernel.file for kernel in found}:
        raise UserError(f'{", ".join(sorted(missing))}: no kernel in the output of the compiler')
    bad = problems(found, log)
    if args.check:
        bad += beyond(found, args.page)
    else:
        kept = kept_lines(args.page, args.files) if args.files else []
        update(args.page, 'resources', table(found, kept), f'python -m {PROGRAM}')
    print(f'{len(found)} kernels; registers: at most {max(kernel.registers for kernel in found)}')
    if folder := args.objects or (None if args.log else BUILD):
        bad += waits(instructions(path for path in folder.rglob('*.o') if not args.files or path.stem in args.files))
    if bad:
        raise UserError('; '.join(bad))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
