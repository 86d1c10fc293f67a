"""All checks that require a GPU, in parts.

    python -m bench.gpu_check                   list the parts; also: make gpu-check
    python -m bench.gpu_check products ladder   run parts; also: make gpu-check PART=products
    python -m bench.gpu_check all               run all parts

A run first builds the libraries that its parts need, for the GPU of this machine.  Each part has its own time limit.  The
report, bench/results/gpu-NAME.json, is written while a part runs, so a run that is killed leaves its results; other parts in
it are kept.  Nothing is installed or downloaded; git and PyTorch are optional.

Exit status: 0 if everything passed, 1 if a check failed, 2 if the check cannot run here, 3 if nothing failed but a time limit
left something out.
"""
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench.gpu_contest import CUT, WRONG
from bench.results import ROOT, commit
from pyops.errors import UserError, exits_cleanly
from pyops.files import write_atomically
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.gpu_check'
BUILD_LIMIT = 300
# The last is the parser of cffi.
MODULES = {'numpy': True, 'cffi': True, 'pycparser': True, 'safetensors': True, 'tqdm': True, 'pytest': True, 'torch': False}
QUEUED = {'PYOPS_SYNC': '0'}                   # as in the programs
AT_ONCE = {'PYOPS_SYNC': '1'}                   # errors are raised by the call that caused them
EMULATION = {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_CHAINS': '100'}
FOLDER = ROOT / 'build' / 'gpu-check'           # logs and figures of the steps
CUDA_TOOLS = '/usr/local/cuda/bin'


class Part(NamedTuple):
    what: str
    steps: object           # steps(emulated) -> [Step]
    limit: int = 240        # seconds
    targets: tuple = ()     # of make, beyond the libraries
    tool: str = ''          # a program that it needs, on a GPU only


class Step(NamedTuple):
    command: list
    environment: dict
    figures: str = ''       # the suffix of the file that the command writes: .json for bench.gpu, .jsonl for bench.deadline
    is_sample: bool = False     # as many tests as fit in the time limit


def test_file(name):
    """Return the path of a test file or module, in whichever folder of tests/ it is."""
    found = sorted((ROOT / 'tests').rglob(name))
    if not found:
        raise UserError(f'tests/{name}: no such file; restore the folder tests')
    return str(found[0].relative_to(ROOT))


def pytest(emulated, names, environment, select='', before=(), is_sample=False, more=()):
    files = [test_file(f'test_{name}.py') for name in names.split()]
    command = [*before, sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'bench.deadline', '-rs',
               '--on', 'emulated' if emulated else 'gpu', *more, *files, *(('-k', select) if select else ())]
    return Step(command, environment, '.jsonl', is_sample)


def section(name):
    def steps(emulated):
        return [Step([sys.executable, '-m', 'bench.gpu', '--only', name, *(['--trial'] if emulated else [])], {}, '.json')]
    return steps


def conformance(emulated):
    libraries = [f'build/conformance/{name}.so' for name in ('emulated' if emulated else 'cuda', 'emulated')]
    return [Step([sys.executable, test_file('conformance.py'), *libraries], {})]


def ladder(emulated):
    size = ('256', '512', '192') if emulated else ('8192', '8192', '8192')
    folder, library = ('emulated', 'libpyops_emulated.so') if emulated else ('cuda', 'libpyops_cuda.so')
    return [Step([f'build/{folder}/ladder', *size, f'./pyops/{library}'], {})]


def op_table(emulated):
    select = 'not torch and not central_differences'
    return [pytest(emulated, 'bf16 fp8 fp8_layers packed_gru scaled_formats hadamard narrow_sums optim', AT_ONCE, select),
            pytest(emulated, 'table ops kernels strided formats', AT_ONCE, select)]


def plans(emulated):
    return [pytest(emulated, 'plan mlp_step', AT_ONCE, 'not central_differences'),
            pytest(emulated, 'ndarray', AT_ONCE, 'gpu')]


def programs(emulated):
    return [pytest(emulated, 'gpu fp8_training', QUEUED)]


def sanitizer(tool):
    def steps(emulated):
        # Kernels under a sanitizer take up to a thousand times longer.
        before = [_which('compute-sanitizer'), '--tool', tool, '--error-exitcode', '1']
        return [pytest(emulated, 'table', AT_ONCE, 'uninitialised and not 1001 and not 1100', before, True, ['-x'])]
    return steps


PARTS = {
    'conformance': Part('every wrapped instruction against a formula and the emulator', conformance, 60, ('conformance',)),
    'products': Part('matrix products at the sizes of the programs against float64, timed beside PyTorch', section('products')),
    'layers': Part('attention, GRU, output layer, mlp_step and formats against the CPU library, timed', section('layers')),
    'attention': Part('attention over 512 to 8192 tokens against float64, timed beside flash attention', section('attention')),
    'fp8': Part('products in FP8 against float64, timed beside torch._scaled_mm; training in FP8 against its emulation',
                section('fp8')),
    'ladder': Part('the steps from a loop to wgmma: exact sums before and after timing', ladder, 120, ('ladder',)),
    'ops': Part('bfloat16 activations, optimisers, the op table, kernels and formats', op_table),
    'plans': Part('plans, the step of the digits in one op, arrays', plans),
    'programs': Part('the programs and the device', programs),
    'memory': Part('memory-bound kernels against the CPU library and the bandwidth of a copy', section('memory'), 90),
    'mnist': Part('mnist: training steps against the CPU, timed beside PyTorch', section('mnist'), 150),
    'seq2seq': Part('seq2seq: likewise', section('seq2seq')),
    'transformer': Part('transformer small: likewise', section('transformer')),
    'base': Part('transformer base: likewise', section('base')),
    'gpt2': Part('GPT-2 with 124 million parameters: likewise, in tokens a second', section('gpt2')),
    'memcheck': Part('as many ops as fit in the limit, under compute-sanitizer memcheck', sanitizer('memcheck'),
                     tool='compute-sanitizer'),
    'racecheck': Part('likewise, racecheck', sanitizer('racecheck'), tool='compute-sanitizer'),
}


# ---- running ---------------------------------------------------------------------------------------------------------

def environment(extra, emulated):
    """Return the environment of a step: this tree first on PYTHONPATH, and no make that calls us."""
    ours = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MFLAGS', 'MAKELEVEL')}
    ours['PYTHONPATH'] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    ours['PATH'] = os.pathsep.join([os.environ.get('PATH', os.defpath), CUDA_TOOLS])
    return ours | {'PYTHONUNBUFFERED': '1'} | (EMULATION if emulated else {}) | extra


def read_figures(path):
    """Return the figures of a step so far, what is wrong in them, and the number of figures or tests left out."""
    if not path or not path.exists():
        return None, [], 0
    if path.suffix == '.json':
        figures = json.loads(path.read_text())
        return figures, figures['wrong'], len(figures['left_out'])
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith('}')]
    count = {}
    for line in lines:
        count[line['outcome']] = count.get(line['outcome'], 0) + 1
    failed = [f'{line["test"]}: {line["error"]}' for line in lines if line['outcome'] == 'failed']
    slowest = sorted(lines, key=lambda line: -line['seconds'])[:5]
    figures = dict(count=count, failed=failed, slowest=[[line['test'], line['seconds']] for line in slowest])
    return figures, failed, count.get('left out', 0)


def run_step(name, step, limit, emulated, watch):
    """Run a step and return its result.  watch(result) is called with the result so far whenever its output has grown."""
    print(f'==== {name}: {" ".join(map(str, step.command))}', flush=True)
    log, figures = FOLDER / f'{name}.log', FOLDER / f'{name}{step.figures}' if step.figures else None
    command, extra, soft = list(step.command), dict(step.environment), max(1, int(limit - max(15, limit / 4)))
    if figures:
        figures.unlink(missing_ok=True)
    if step.figures == '.json':
        command += ['--json', str(figures), '--limit', str(soft)]
    if step.figures == '.jsonl':
        extra |= {'GPU_CHECK_RECORD': str(figures), 'GPU_CHECK_DEADLINE': str(soft)}
    start, size, status = time.monotonic(), -1, None

    def result(outcome):
        found, wrong, left_out = read_figures(figures)
        return dict(outcome=outcome, seconds=round(time.monotonic() - start, 1), limit=limit, wrong=wrong, left_out=left_out,
                    figures=found, tail=log.read_text(errors='replace').splitlines()[-40:])

    # In a process group of its own, which is killed with its children, since they may use the GPU.
    with open(log, 'wb') as file:
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(extra, emulated), stdout=file,
                                       stderr=subprocess.STDOUT, process_group=0, preexec_fn=die_with_parent)
        except OSError as error:
            print(f'==== {name}: {command[0]}: {error.strerror}', flush=True)
            return result(f'failed: {command[0]}: {error.strerror}')
        try:
            while status is None and time.monotonic() - start < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(0.2 if time.monotonic() - start < 3 else 1)
                now = sum(path.stat().st_size for path in (log, figures) if path and path.exists())
                if now != size:
                    size = now
                    watch(result('running'))
        finally:
            end(process)
    done = result('')
    done['outcome'] = outcome(status, done, step, limit)
    passed = done['outcome'].startswith('passed')
    print('\n'.join(done['tail'] if not passed or step.figures == '.json' else done['tail'][-3:]))
    print(f'==== {name}: {done["outcome"]}, {done["seconds"]:.0f} of {limit:.0f} s', flush=True)
    return done


def die_with_parent():
    """Let the kernel kill this process when its parent dies, even by SIGKILL."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process):
    """End a process group: politely first, since make then removes the files that it has not finished."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        os.killpg(process.pid, signal.SIGKILL)


def outcome(status, done, step, limit):
    if done['wrong']:
        return f'failed: {len(done["wrong"])} wrong'
    if status is None:
        return f'cut: stopped after {limit:.0f} s'
    if status not in (0, CUT):
        return f'failed with status {status}'
    if done['left_out']:
        return f'{"passed" if step.is_sample else "cut"}: {done["left_out"]} left out for lack of time'
    return 'passed' if status == 0 else 'cut'


def state(result):
    """Return the exit status of a part's outcome."""
    return WRONG if result['outcome'].startswith('failed') else CUT if result['outcome'].startswith(('cut', 'running')) else 0


def run_part(name, part, limit, emulated, watch):
    """Run the steps of a part within its limit and return its result."""
    start = time.monotonic()
    made = dict(outcome='running', date=time.strftime('%Y-%m-%d %H:%M'), commit=commit() or None, steps=[])
    for i, step in enumerate(part.steps(emulated)):
        left = limit - (time.monotonic() - start)
        if left < 1:
            made['steps'].append(dict(outcome='cut: no time was left', seconds=0.0))
            continue

        def keep(result, before=tuple(made['steps'])):
            made['steps'] = [*before, result]
            watch(made)
        keep(run_step(f'{name}-{i + 1}' if i else name, step, left, emulated, keep))
    made['seconds'] = round(time.monotonic() - start, 1)
    made['outcome'] = max(made['steps'], key=lambda step: (state(step) == WRONG, state(step)))['outcome']
    watch(made)
    return made


def build(parts, emulated, watch):
    """Build what the parts need and return the result."""
    targets = {'cpu', 'emulated'} if emulated else {'cpu', 'cuda', 'CUDA_ARCH=native'}
    for name in parts:
        more = PARTS[name].targets
        if emulated:
            targets |= {'build/conformance/emulated.so'} if more == ('conformance',) else set()
        else:
            targets |= {'build/cuda/ladder' if target == 'ladder' else target for target in more}
    step = Step(['make', f'-j{os.cpu_count()}', f'PYTHON={sys.executable}', *sorted(targets)], {})
    return run_part('build', Part('', lambda emulated: [step]), BUILD_LIMIT, emulated, watch)


# ---- the command -----------------------------------------------------------------------------------------------------

def _which(tool):
    return shutil.which(tool) or shutil.which(tool, path=CUDA_TOOLS)


def problems(emulated):
    """Yield a line for each reason why the check cannot run here."""
    tools = ('make', 'g++', 'gcc') if emulated else ('make', 'g++', 'gcc', 'nvidia-smi', os.environ.get('NVCC', 'nvcc'))
    for tool in tools:
        if not _which(tool):
            yield f'{tool} is not on the PATH; install it or add its folder'
    for module, is_needed in MODULES.items():
        if find_spec(module) is None:
            if is_needed:
                yield (f'the Python package {module} is not installed for {sys.executable}; install it, or add the folder '
                       'that contains it to PYTHONPATH')
            else:
                print(f'{module} is not installed: times without it', file=sys.stderr)


def device(emulated):
    """Return name, driver and compute capability of the GPU.  UserError if there is none."""
    if emulated:
        return dict(device='emulated device', driver=None, capability=None)
    found = subprocess.run(['nvidia-smi', '--query-gpu=name,driver_version,compute_cap', '--format=csv,noheader'],
                           capture_output=True, text=True)
    if found.returncode or not found.stdout.strip():
        raise UserError(f'no GPU: {" ".join((found.stdout + found.stderr).split())}; use a machine with a GPU, or --emulated')
    return dict(zip(('device', 'driver', 'capability'), map(str.strip, found.stdout.splitlines()[0].split(',')), strict=True))


class Report:
    """The report in a file, with the parts of earlier runs on the same device."""

    def __init__(self, path, about):
        self.path, self.data = path, about | dict(parts={})
        with contextlib.suppress(OSError, ValueError, KeyError):
            before = json.loads(path.read_text())
            if before['device'] == about['device']:
                self.data['parts'] = before['parts']

    def watch(self, name):
        def keep(result):
            self.data['parts'][name] = result
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, (json.dumps(self.data, indent=1) + '\n').encode())
            except OSError as error:
                raise UserError(f'{self.path}: cannot be written ({error.strerror}); choose another with --report') from error
        return keep


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('parts', nargs='*', metavar='PART', help=f'all, or any of {", ".join(PARTS)}; default: list them')
    p.add_argument('--emulated', action='store_true', help='small sizes on the emulator, which needs no GPU')
    p.add_argument('--limit', type=positive_int, metavar='SECONDS', help='the limit of each part')
    p.add_argument('--report', type=Path, metavar='FILE', help='default: bench/results/gpu-NAME.json')
    args = p.parse_args(argv)
    for name in args.parts:
        if name not in PARTS and name != 'all':
            raise UserError(f'{name}: no such part; expected all or one of {", ".join(PARTS)}')
    return args


def listing():
    return '\n'.join(['parts, run with: make gpu-check PART=NAME, or PART=all', '',
                      *(f'  {name:12} {part.limit:4} s  {part.what}' for name, part in PARTS.items())])


def stop(number, frame):
    sys.exit(128 + number)          # so that the running step is killed


def main(argv=None):
    start, args = time.monotonic(), parse(argv)
    if not args.parts:
        print(listing())
        return 0
    if found := list(problems(args.emulated)):
        raise UserError('; '.join(found))
    names = list(PARTS) if 'all' in args.parts else list(dict.fromkeys(args.parts))
    absent = {name: PARTS[name].tool for name in names if PARTS[name].tool and (args.emulated or not _which(PARTS[name].tool))}
    if absent and 'all' not in args.parts:
        name, tool = next(iter(absent.items()))
        raise UserError(f'{name}: needs {tool} and a GPU; install it with the CUDA toolkit, or choose another part')
    names = [name for name in names if name not in absent]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    about = device(args.emulated)
    FOLDER.mkdir(parents=True, exist_ok=True)
    slug = re.sub('[^a-z0-9]+', '-', about['device'].lower()).strip('-')
    path = args.report or (FOLDER / 'report.json' if args.emulated else ROOT / f'bench/results/gpu-{slug}.json')
    report, results = Report(path, about), {}
    results['build'] = build(names, args.emulated, report.watch('build'))
    if state(results['build']) == 0:
        for name in names:
            limit = args.limit or PARTS[name].limit
            results[name] = run_part(name, PARTS[name], limit, args.emulated, report.watch(name))
    print(f'\n{about["device"]}, driver {about["driver"]}, {time.monotonic() - start:.0f} s')
    for name, result in results.items():
        print(f'  {name:12} {result["outcome"]}, {result["seconds"]:.0f} s')
    for name, tool in absent.items():
        print(f'  {name:12} left out: needs {tool} and a GPU')
    for line in (line for result in results.values() for step in result['steps'] for line in step.get('wrong', ())):
        print(f'  WRONG {line}')
    print(f'report: {path}')
    states = [state(result) for result in results.values()]
    return WRONG if WRONG in states else max(states)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
