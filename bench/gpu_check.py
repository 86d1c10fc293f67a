"""All checks that require a GPU, in one command: `make gpu-check`.

It builds for the GPU of this machine, compares every wrapped instruction with its emulation, runs the tests on the device and
under compute-sanitizer, and benchmarks it against PyTorch (bench/gpu.py).  It installs nothing, reports missing tools, ends
within nine minutes, and writes bench/results/gpu-NAME.json, which also records failures.
"""
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

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 9 * 60 - 15         # seconds in all, with some reserved for the report
MODULES = {'numpy': True, 'cffi': True, 'safetensors': True, 'tqdm': True, 'pytest': True, 'torch': False}   # True: required
TABLE = ['tests/ops/test_table.py', 'tests/ops/test_ops.py', 'tests/backend/test_kernels.py', 'tests/backend/test_strided.py']
PYTEST = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-rs']


def steps(report):
    """Yield (name, time limit in seconds, command, environment) of each step, in order."""
    make = ['make', f'-j{os.cpu_count()}', f'PYTHON={sys.executable}']
    sanitizer = shutil.which('compute-sanitizer') or '/usr/local/cuda/bin/compute-sanitizer'
    yield 'build', 240, [*make, 'cpu', 'cuda', 'emulated', 'conformance', 'CUDA_ARCH=native'], {}
    yield 'conformance', 60, [*PYTEST, 'tests/cuda/test_emulator.py', '-k', 'hardware'], {'PYOPS_HARDWARE': '1'}
    yield 'op table', 120, [*PYTEST, '--on', 'gpu', *TABLE, '-k', 'not torch and not central_differences'], {}
    yield 'bench', 200, [sys.executable, '-m', 'bench.gpu', '--json', str(ROOT / 'build/gpu-bench.json')], {}
    tests = ['tests/backend/test_gpu.py', 'tests/training/test_plan.py']
    yield 'programs and plans', 90, [*PYTEST, '--on', 'gpu', *tests], {'PYOPS_SYNC': '0'}
    if Path(sanitizer).exists():
        for tool in ('memcheck', 'racecheck'):
            yield tool, 75, [sanitizer, '--tool', tool, '--error-exitcode', '1', *PYTEST, '--on', 'gpu', '-x', TABLE[0],
                             '-k', 'uninitialised and not 1001 and not 1100'], {}
    else:
        report['compute-sanitizer'] = 'not found'


def run(name, limit, command, environment):
    """Run a step and return its outcome.  The last lines of its output go to the terminal and the report."""
    print(f'==== {name}: {" ".join(command)}', flush=True)
    start, log = time.monotonic(), ROOT / f'build/gpu-check-{name.replace(" ", "-")}.log'
    with open(log, 'wb') as file:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)} | environment, stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
            outcome = 'passed' if status == 0 else f'failed with status {status}'
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)      # also kills its children, which may use the GPU
            process.wait()
            outcome = f'stopped after {limit:.0f} s'
    tail = log.read_text(errors='replace').splitlines()[-40:]
    print('\n'.join(tail if outcome != 'passed' or name == 'bench' else tail[-3:]))
    print(f'==== {name}: {outcome}, {time.monotonic() - start:.0f} s', flush=True)
    return dict(outcome=outcome, seconds=round(time.monotonic() - start, 1), tail=tail)


def missing():
    """Yield a line for each problem that prevents the check."""
    for tool in ('nvidia-smi', os.environ.get('NVCC', 'nvcc'), 'make', 'g++', 'gcc'):
        if not shutil.which(tool):
            yield f'{tool} is not on the PATH'
    for module, is_needed in MODULES.items():
        if find_spec(module) is None:
            if is_needed:
                yield f'the Python package {module} is not installed for {sys.executable}'
            else:
                print(f'{module} is not installed: that part of the check is left out')


def main():
    start = time.monotonic()
    if problems := list(missing()):
        print('\n'.join(f'gpu-check: error: {problem}' for problem in problems), file=sys.stderr)
        return 2
    (ROOT / 'build').mkdir(exist_ok=True)
    gpu = subprocess.run(['nvidia-smi', '--query-gpu=name,driver_version,compute_cap', '--format=csv,noheader'],
                         capture_output=True, text=True)
    if gpu.returncode or not gpu.stdout.strip():
        print(f'gpu-check: error: no GPU: {" ".join((gpu.stdout + gpu.stderr).split())}', file=sys.stderr)
        return 2
    name, driver, capability = (part.strip() for part in gpu.stdout.splitlines()[0].split(','))
    report = dict(device=name, driver=driver, capability=capability, date=time.strftime('%Y-%m-%d'), steps={})
    commit = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True)
    report['commit'] = commit.stdout.strip() or None
    out = ROOT / f'bench/results/gpu-{re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")}.json'
    out.parent.mkdir(exist_ok=True)
    for step, limit, command, environment in steps(report):
        left = LIMIT - (time.monotonic() - start)
        if left < 10:
            report['steps'][step] = dict(outcome='left out: no time was left')
            continue
        report['steps'][step] = run(step, min(limit, left), command, environment)
        bench = ROOT / 'build/gpu-bench.json'
        if step == 'bench' and bench.exists():
            report['bench'] = json.loads(bench.read_text())
        out.write_text(json.dumps(report, indent=1) + '\n')
        if step == 'build' and report['steps'][step]['outcome'] != 'passed':
            break
    print(f'\n{name}, driver {driver}, {time.monotonic() - start:.0f} s')
    for step, result in report['steps'].items():
        print(f'  {step:20} {result["outcome"]}')
    print(f'report: {out.relative_to(ROOT)}')
    return 0 if all(result['outcome'] == 'passed' for result in report['steps'].values()) else 1


if __name__ == '__main__':
    sys.exit(main())
