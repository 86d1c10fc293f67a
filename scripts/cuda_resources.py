"""Write the registers, shared memory and spills of every CUDA kernel into docs/cuda_resources.md.  Requires nvcc, but no GPU.

    python -m scripts.cuda_resources               compile for sm_80 and sm_90a and rewrite the table; takes minutes
    python -m scripts.cuda_resources gemm optim    only these files; the lines of the others stay
    python -m scripts.cuda_resources --log FILE    read the compiler's output from FILE instead

Exit status 2 if a kernel spills registers, or the compiler serialises wgmma instructions.
"""
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'scripts.cuda_resources'
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'cuda_resources.md'
ARCHITECTURES = 'sm_80', 'sm_90a'

OBJECT = re.compile(r'^nvcc \S*/(\w+)\.o$')         # printed by make before the output for an object
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
SPILLS = re.compile(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads')
USED = re.compile(r'Used (\d+) registers(?:.*?(\d+) bytes smem)?')
FILE = re.compile(r'_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}')     # nvcc's name of a file's anonymous namespace


class Kernel(NamedTuple):
    file: str               # without its suffix
    name: str               # with template arguments, without function arguments
    architecture: str
    registers: int
    shared: int             # static shared memory, bytes; more may be requested at launch
    stored: int             # spill stores, bytes
    loaded: int             # spill loads, bytes


def compiled(files=()):
    """Return the output of a build of the whole library, or of some files, with ptxas -v."""
    if not shutil.which('nvcc'):
        raise UserError('nvcc: not found; install the CUDA toolkit, or give the output of a build with --log')
    folder = ROOT / 'build' / 'resources'
    shutil.rmtree(folder, ignore_errors=True)           # an object that is up to date prints nothing
    targets = [f'{folder}/{path.relative_to(ROOT / "cuda").with_suffix(".o")}' for path in map(_source, files)]
    command = ['make', '-O', *(targets or ['cuda']), 'CUDA_ARCH=80;90a', 'NVCC_EXTRA=-Xptxas -v', f'CUDA_BUILD={folder}',
               f'CUDA_LIBRARY={folder}/libpyops_cuda.so']
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
            entries.append((file, *entry, int(match[1]), int(match[2] or 0), *spills[1:]))
            entry = spills = None
    if not entries:
        raise UserError('no kernel in the output of the compiler; expected the output of nvcc -Xptxas -v')
    for name, (file, _, *rest) in zip(readable([name for _, name, *_ in entries]), entries, strict=True):
        yield Kernel(file, name, *rest)


def kept_lines(page, files):
    """Return the lines of the table on a page that belong to other files."""
    rows = [line for line in page.read_text().splitlines() if line.startswith('| ') and '`' in line]
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
    bad = [f'{kernel.file}: {kernel.name} ({kernel.architecture}): spills {kernel.stored} bytes' for kernel in found
           if kernel.stored]
    return bad + [line.strip() for line in log.splitlines() if 'wgmma' in line and 'serialized' in line]


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Write the table of registers and spills of CUDA kernels.')
    p.add_argument('files', nargs='*', metavar='NAME', help='a .cu file without its suffix (default: all)')
    p.add_argument('--log', type=Path, metavar='FILE', help='output of a build with NVCC_EXTRA="-Xptxas -v" (default: build)')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help='page to update (default docs/cuda_resources.md)')
    args = p.parse_args(argv)
    log = args.log.read_text() if args.log else compiled(args.files)
    found = [kernel for kernel in kernels(log) if not args.files or kernel.file in args.files]
    kept = kept_lines(args.page, args.files) if args.files else []
    update(args.page, 'resources', table(found, kept), f'python -m {PROGRAM}')
    print(f'{len(found)} kernels; registers: at most {max(kernel.registers for kernel in found)}')
    if bad := problems(found, log):
        raise UserError('; '.join(bad))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
