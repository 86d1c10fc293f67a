"""Exercises: python -m pyops exercises list | start NAME DIR | check NAME DIR.

An exercise is made from the source of an op: the class without the bodies of forward and backward, or the prototypes and
formulas of its kernels in pyops.h.  `check` runs the gradient check of the op on the learner's file.  The formula it compares
with is the op's own reference.  Kernels in C are compiled alone, and replace the library's kernels; a file in CUDA is linked
into the emulated library in place of the original.  Both run in a process of their own, which may crash.
"""
import ast
import contextlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, printable

PACKAGE = Path(__file__).resolve().parent
SEEDS = 0, 1
BLANK = 'forward', 'backward'
# members that contain the formula, or need the package
ANSWERS = 'reference', 'example', 'rounded', 'backward_on_tensors', 'step'
HELPERS = 'launch_forward', 'launch_backward', 'weights'                # and those that only forward and backward call


class Exercise(NamedTuple):
    op: str             # name of the op, as for `pyops gradcheck`
    text: str
    kernels: tuple = () # of an exercise in C or CUDA
    suffix: str = '.py'


EXERCISES = {
    'relu': Exercise('relu', 'an elementwise function, and why backward needs no x'),
    'linear': Exercise('linear', 'a matrix product with a bias; gradients of parameters add'),
    'softmax': Exercise('softmax', 'a normalised exponential along an axis, without overflow'),
    'layer_norm': Exercise('layer_norm', 'each row to mean 0 and variance 1; a gradient through both statistics'),
    'cross_entropy': Exercise('cross_entropy', 'the loss of a classifier, with masked rows'),
    'gru': Exercise('gru', 'a recurrent layer over a whole sequence; backpropagation through time'),
    'attention': Exercise('attention', 'multi-head attention with masks'),
    'relu-c': Exercise('relu', 'the two kernels of relu in C', ('relu_forward', 'relu_backward'), '.c'),
    'softmax-c': Exercise('softmax', 'the two kernels of softmax in C', ('softmax_forward', 'softmax_backward'), '.c'),
    'layer_norm-c': Exercise('layer_norm', 'the two kernels of layer norm in C', ('layer_norm_forward', 'layer_norm_backward'),
                             '.c'),
    'cross_entropy-cuda': Exercise('cross_entropy', 'the two kernels of cross entropy in CUDA, on the emulator',
                                   ('cross_entropy_forward', 'cross_entropy_backward'), '.cu'),
}


class Check(NamedTuple):
    name: str
    passed: bool
    message: str = ''


# ---- the file of an exercise -------------------------------------------------------------------------------------------

def text_of(name, blank=True):
    """Return the text of the file to complete.  blank False: the solution, for an exercise in Python."""
    exercise = EXERCISES[name]
    return _kernels_text(name, exercise) if exercise.kernels else _python_text(name, exercise, blank)


def _op_of(exercise):
    from pyops.differences import find_op
    return find_op(exercise.op)


def _python_text(name, exercise, blank):
    op = _op_of(exercise)
    source = Path(inspect.getsourcefile(op)).read_text()
    tree, lines = ast.parse(source), source.splitlines()
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == op.__name__)
    edits = []                  # (first line, last line, new lines), of members of the class, numbered from 1
    for node in found.body:
        member = getattr(node, 'name', None) or ','.join(getattr(target, 'id', '') for target in getattr(node, 'targets', ()))
        if member.split(',')[0] in ANSWERS + HELPERS * blank:
            edits.append((min([node.lineno, *(d.lineno for d in getattr(node, 'decorator_list', ()))]), node.end_lineno, []))
        elif member in BLANK and blank:
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = body[0].lineno if body else node.end_lineno + 1
            edits.append((first, node.end_lineno, [f'{" " * (node.col_offset + 4)}raise NotImplementedError']))
    kept = lines[found.lineno - 1:found.end_lineno]
    for first, last, new in reversed(edits):
        kept[first - found.lineno:last - found.lineno + 1] = new
    code = re.sub(r'\n\n\n+', '\n\n', '\n'.join(kept)).rstrip()
    others, last_import = {}, 1
    for node in tree.body[1:]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If):
            last_import = node.end_lineno
        elif node is not found and not isinstance(node, ast.Expr):
            names = [node.name] if hasattr(node, 'name') else [
                part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            others |= dict.fromkeys(names, (node.lineno, '\n'.join(lines[node.lineno - 1:node.end_lineno])))
    header = (f'"""Exercise {name}: {exercise.text}.\n\nComplete {" and ".join(BLANK)}, with numpy or with the kernels of '
              f'pyops.  Then run:\n\n    python -m pyops exercises check {name} DIR\n"""\n')
    imports = '\n'.join(lines[tree.body[0].end_lineno:last_import]).lstrip('\n')
    return '\n\n\n'.join([header + imports, *_needed(code, others), code]) + '\n'


def _needed(code, others):
    """Return the definitions of a module that `code` uses, directly or through each other, in their order."""
    chosen, names = {}, [node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    while names:
        name = names.pop()
        if name in others and others[name] not in chosen.values():
            chosen[name] = others[name]
            names += [node.id for node in ast.walk(ast.parse(others[name][1])) if isinstance(node, ast.Name)]
    return [segment for _, segment in sorted(set(chosen.values()))]


def _kernels_text(name, exercise):
    header, is_cuda = (PACKAGE / 'pyops.h').read_text(), exercise.suffix == '.cu'
    includes = re.findall('^#include.*', _cuda_source(exercise).read_text(), re.M) if is_cuda else ['#include "pyops.h"']
    parts = [f'/* Exercise {name}: {exercise.text}.\n *\n * Complete the functions, then run: python -m pyops exercises check '
             f'{name} DIR\n */\n' + '\n'.join(includes)]
    for kernel in exercise.kernels:
        prototype = re.search(rf'^PYOPS_API (pyops_status pyops_{kernel}\([^)]*\));', header, re.M)
        before = header[:prototype.start()]
        comment = before[before.rindex('/*'):before.rindex('*/') + 2]
        if comment not in parts:
            parts.append(comment)
        linkage, failed = '', 'PYOPS_DEVICE_ERROR'
        if is_cuda:
            linkage, failed = 'extern "C" ', f'pyops_fail(PYOPS_DEVICE_ERROR, "{kernel}: not written yet")'
        parts.append(f'{linkage}{prototype[1]} {{\n    return {failed};\n}}')
    return '\n\n'.join(parts) + '\n'


def _cuda_source(exercise):
    """Return the path of the original file.  UserError without the source tree or the objects of the emulated library."""
    path = PACKAGE.parent / 'cuda' / f'{exercise.op}.cu'
    if not path.exists() or not (PACKAGE.parent / 'build/emulated' / f'{exercise.op}.o').exists() or not shutil.which('make'):
        raise UserError('exercises: CUDA needs the source tree and its objects for the emulator: run `make emulated` there')
    return path


# ---- checks --------------------------------------------------------------------------------------------------------------

def checks_of(name, path):
    """Return the Checks of the learner's file.  Kernels in CUDA must be in the loaded library."""
    from pyops import backend
    exercise = EXERCISES[name]
    if exercise.suffix == '.cu':
        return _checks(_op_of(exercise), path)
    with backend.on(backend.HOST), tempfile.TemporaryDirectory() as folder:
        if exercise.kernels:
            library, error = _compiled(path, Path(folder))
            if library is None:
                return [Check('compile', False, error)]
            with _replaced(library, exercise.kernels):
                return _checks(_op_of(exercise), path)
        try:
            attempt = _loaded(path, _op_of(exercise))
        except Exception as error:
            return [Check('import', False, _line(error, path))]
        return _checks(attempt, path)


def kernel_checks_of(name, path):
    """Return the Checks of kernels, in a process of their own."""
    exercise = EXERCISES[name]
    if exercise.suffix == '.c':
        return _in_a_process(name, path)
    _cuda_source(exercise)
    with tempfile.TemporaryDirectory() as folder:
        file = shutil.copy(path, Path(folder) / 'exercise.cu')
        command = ['make', '-s', '-C', PACKAGE.parent, 'exercise', f'FILE={file}', f'OUT={folder}', f'NAME={exercise.op}']
        environment = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}
        done = subprocess.run(command, capture_output=True, text=True, env=environment | {'LC_ALL': 'C'})
        if done.returncode:
            return [Check('compile', False, _first_error(done.stderr).replace(str(file), path.name))]
        return _in_a_process(name, path, PYOPS_BACKEND='gpu', PYOPS_EMULATE_CUDA='1', PYOPS_SYNC='1',
                             PYOPS_CUDA_LIBRARY=str(Path(folder) / 'exercise.so'))


def _first_error(text):
    """Return the first error in the messages of a compiler."""
    errors = [line for line in text.splitlines() if ' error: ' in line or 'undefined reference' in line]
    return printable((errors or text.splitlines() or ['the compiler failed'])[0])


def _checks(op, path):
    """Return the Checks of an op class.  An exception of the learner's code is a failed check."""
    found = []
    for name, function in ((*((f'values and gradients, example {seed + 1}', lambda seed=seed: _wrong_rows(op, seed))
                              for seed in SEEDS), ('gradients add, dy is unchanged', lambda: _overwritten(op)))):
        try:
            wrong = function()
        except Exception as error:
            wrong = [_line(error, path)]
        found.append(Check(name, not wrong, '; '.join(wrong)))
    return found


def _wrong_rows(op, seed):
    from pyops.differences import check_op
    return [f'{row.name}{list(row.at)}: {row.got:.6g}, expected {row.want:.6g}'
            for row in check_op(op, seed).rows if not row.ok]


def _overwritten(op):
    """Run backward twice.  Return the parameters whose gradient is not the old one plus twice the gradient, and dy if it has
    changed."""
    import numpy as np

    from pyops.backend import get, put
    from pyops.ops.array import ArrayOp
    from pyops.params import Parameter
    if issubclass(op, ArrayOp):                         # no parameters; dy is an NDArray, whose changes autograd detects
        return []
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape).astype(np.float32)
    inputs, named = op.example(normal)
    parameters = {name: Parameter(name, put(value), put(normal(*value.shape))) for name, value in named.items()
                  if isinstance(value, np.ndarray)}
    before = {name: get(p.grad).copy() for name, p in parameters.items()}
    instance = op(**{**named, **parameters})
    y, ctx = instance.forward(*map(put, inputs))
    given = normal(*y.shape)
    dy = put(given.copy())
    instance.backward(dy, ctx)
    once = {name: get(p.grad).copy() for name, p in parameters.items()}
    instance.backward(dy, ctx)
    wrong = [f'{name}: backward must add to the gradient of a parameter, not overwrite it' for name, p in parameters.items()
             if not np.allclose(get(p.grad), 2 * once[name] - before[name], rtol=1e-4, atol=1e-4)]
    return wrong + ['dy: backward must not change it'] * (not np.array_equal(get(dy), given))


def _loaded(path, op):
    """Return the learner's class, with the formula and the example of the op."""
    spec = importlib.util.spec_from_file_location('pyops_exercise', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, op.__name__, None)
    if not isinstance(found, type):
        raise TypeError(f'the file has no class {op.__name__}')
    return type(op.__name__, (found,), {member: vars(op)[member] for member in ('reference', 'example')})


def _compiled(path, folder):
    """Compile a C file to a library.  Return it and '', or None and the first message of the compiler."""
    compiler = os.environ.get('CC') or next(filter(shutil.which, ('gcc', 'clang', 'cc')), None)
    if compiler is None:
        raise UserError('exercises: there is no C compiler: install gcc or clang, or name one in CC')
    target = folder / 'exercise.so'
    command = [compiler, '-std=gnu11', '-O2', '-fPIC', '-shared', '-fopenmp', f'-I{PACKAGE}', '-o', target, path, '-lm']
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {'LC_ALL': 'C'})
    if done.returncode:
        return None, _first_error(done.stderr)
    from pyops.backend import library
    return library.cpu().ffi.dlopen(str(target)), ''


@contextlib.contextmanager
def _replaced(library, kernels):
    """Run these kernels from another library inside the block."""
    from pyops.backend import HOST, state

    def function_of(kernel):
        function = getattr(library, f'pyops_{kernel}')

        def run(*arguments):
            if status := function(*arguments):
                raise RuntimeError(f'pyops_{kernel} returned {status}, expected PYOPS_OK')
            return 0
        return run
    prepared = {kernel: HOST._prepare(kernel) for kernel in kernels}
    for kernel in kernels:
        HOST._prepare(kernel, function_of(kernel))
    try:
        with state.hooks():         # no short ways of small arrays, which call the library itself
            yield
    finally:
        HOST._functions.update(prepared)


def _line(error, path):
    """Return an exception as one line, with its place in the learner's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f' ({path.name}, line {lines[-1]})' if lines else ''
    text = 'not written yet' if isinstance(error, NotImplementedError) else f'{type(error).__name__}: {printable(error)}'
    return text + where


def _in_a_process(name, path, **variables):
    """Return checks_of in a new process with these environment variables, which a kernel may crash."""
    program = ('import json, sys; from pathlib import Path; from pyops.exercises import checks_of; '
               'print(json.dumps(checks_of(sys.argv[1], Path(sys.argv[2]))))')
    environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(PACKAGE.parent), *sys.path])} | variables
    done = subprocess.run([sys.executable, '-c', program, name, str(path)], env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        return [Check('run', False, f'the kernels crashed: {signal.Signals(-done.returncode).name}')]
    if done.returncode:
        raise UserError(printable(done.stderr.strip().splitlines()[-1]))
    return [Check(*check) for check in json.loads(done.stdout)]


# ---- the command line ----------------------------------------------------------------------------------------------------

def add_commands(parser):
    """Declare list, start and check as subcommands of an ArgumentParser."""
    commands = parser.add_commands()
    command = commands.add_parser('list', help='list the exercises')
    command.set_defaults(run=list_)
    for name, text, run in (('start', 'write the file of an exercise, with forward and backward left out', start),
                            ('check', 'check a completed file; exit with status 1 if a check fails', check)):
        command = commands.add_parser(name, help=text)
        command.add_argument('name', metavar='NAME', choices=EXERCISES, help='name of the exercise, as in `exercises list`')
        command.add_argument('folder', metavar='DIR', help='folder of the file, created if it is missing' if name == 'start'
                             else 'folder of the file')
        command.set_defaults(run=run)
    command.add_argument('--json', action='store_true', help='print the checks as JSON')


def list_(options):
    wide = max(map(len, EXERCISES))
    print('\n'.join(f'{name:{wide}}  {exercise.text}' for name, exercise in EXERCISES.items()))


def _path(options):
    return Path(options.folder) / f'{EXERCISES[options.name].op}{EXERCISES[options.name].suffix}'


def start(options):
    path = _path(options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, 'x') as file:
            file.write(text_of(options.name))
    except FileExistsError:
        raise UserError(f'{printable(path)}: exists; name another folder, or remove it') from None
    except OSError as error:
        raise UserError(f'{printable(path)}: cannot be written ({error.strerror}); name another folder') from error
    print(f'{path}: complete it, then run: python -m pyops exercises check {options.name} {options.folder}')


def check(options):
    path = _path(options)
    if not path.is_file():
        raise UserError(f'{printable(path)}: there is no such file; write it with: python -m pyops exercises start '
                        f'{options.name} {printable(options.folder)}')
    checks = (kernel_checks_of if EXERCISES[options.name].kernels else checks_of)(options.name, path)
    passed = all(check.passed for check in checks)
    if options.json:
        print(json.dumps({'exercise': options.name, 'file': str(path), 'passed': passed,
                          'checks': [check._asdict() for check in checks]}))
    else:
        for check in checks:
            print(f'{"ok   " if check.passed else "WRONG"}  {check.name}')
            if check.message:
                print(textwrap.indent('\n'.join(check.message.split('; ')), '       '))
    return 0 if passed else 1
