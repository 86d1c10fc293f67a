"""Shared by the contests: contestants in separate processes that take turns, and the table of their figures.

Each contestant (bench/worker.py) waits while another works, so that a slow minute of the machine affects all of them.
"""
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np

from bench.results import ROOT
from pyops.errors import UserError
from pyops.flags import positive_int

RECOMPUTE = '-recompute'        # end of our kind if the backward pass computes activations again
NAMES = {'ours': 'pyops', 'ours' + RECOMPUTE: 'pyops recompute', 'torch': 'PyTorch eager', 'torch-compile': 'PyTorch compile',
         'jax': 'JAX', 'jax-scan': 'JAX scan', 'jax-cache': 'JAX, cached', 'llmc': 'llm.c'}
BF16 = '-bf16'          # end of the kind of a contestant whose products have bfloat16 factors: for PyTorch autocast
FP8 = '-fp8'            # end of our kind if linear layers multiply in FP8, and other products as with BF16
NAMES |= {kind + BF16: name + ' bf16' for kind, name in NAMES.items()} | {'ours' + FP8: 'pyops fp8'}
FP8_KINDS = 'ours' + FP8, 'ours' + BF16, 'ours'         # the contestants of --precision fp8
# in translation: a program and its compute type
COMPUTE = {f'{kind}/{compute}': f'{name} {compute}' for compute in ('float32', 'bf16', 'int8')
           for kind, name in (('ours', 'pyops'), ('command', 'translate'), ('ct2', 'CTranslate2'))}
NAMES |= COMPUTE


def add_contestant_flags(p):
    p.add_argument('--no-compile', action='store_true', help='leave out torch.compile, which takes a minute to warm up')
    p.add_argument('--threads', type=positive_int, metavar='N', help='for every contestant (default: all cores)')


def add_recompute_flag(p):
    p.add_argument('--recompute', action='store_true', help='also ours with the activations of each block computed again in '
                   'the backward pass instead of kept: less memory, more time, same numbers')


def add_flags(p):
    add_contestant_flags(p)
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for the data (default $PYOPS_DATA, then ./data)')


def require(package):
    """Raise UserError unless this package is installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f'{package} is not installed; install it with: {sys.executable} -m pip install {package}')


def kinds_of(args, beside_torch, in_bf16=False, recompute=False):
    """Return the kinds of contestants; in_bf16: all in bfloat16, and ours in float32.  UserError if PyTorch is requested but
    not installed."""
    if in_bf16:
        first, *others = kinds_of(args, beside_torch, recompute=recompute)
        return [first + BF16, first, *(kind + BF16 for kind in others)]
    kinds = ['ours'] + ['ours' + RECOMPUTE] * recompute
    if not beside_torch:
        return kinds
    require('torch')
    return [*kinds, 'torch'] + ['torch-compile'] * (not args.no_compile)


# For contestants in PyTorch: malloc keeps freed memory.  Returning large arrays to the system in every step costs page faults:
# with this, steps of the translators take 11 to 20 % less time, and more memory.
KEEP_MEMORY = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(2**40), 'MALLOC_TOP_PAD_': str(2**28)}


def environment_of(kind, threads=1):
    """Return the environment of a contestant's process.  Variables that are set take precedence."""
    if kind == 'llmc':                                  # it has no other setting
        return os.environ | {'OMP_NUM_THREADS': str(threads)}
    return (KEEP_MEMORY if kind.startswith('torch') else {}) | os.environ


def use_cores(threads):
    """Let this process use so many cores.  JAX has no number of threads: before its first array it starts one for each core."""
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def timed_command(command, environment=None):
    """Run Python with these arguments in the source tree.  Return seconds, CPU seconds of its threads, and its output.

    UserError if it fails
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise UserError(f'{" ".join(command)}: exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}')
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


class Contestant:
    """A worker process.  turn(*numbers) runs its job and returns its answer, with `seconds`, `cpu_seconds` and `peak_mib`.

    command: of a contestant in another language, which answers like bench.worker
    """

    def __init__(self, program, job, kind, folder, threads, command=None):
        self.kind, self.threads = kind, threads
        if command is None:
            command = [sys.executable, '-m', 'bench.worker', program, job, kind, str(folder), str(threads)]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=environment_of(kind, threads))
        self.answer()                                   # ready

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f'{NAMES[self.kind]}: its process ended, see above')
        return json.loads(line)

    def turn(self, *numbers):
        print(*numbers, file=self.process.stdin, flush=True)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind:                                        # such as KeyboardInterrupt: do not wait for the end of a turn
            self.process.terminate()
        self.process.stdin.close()
        self.process.wait()


def percentiles(seconds):
    """Return p20_s, median_s and p80_s of several measurements."""
    return dict(zip(('p20_s', 'median_s', 'p80_s'), np.percentile(seconds, (20, 50, 80)).round(7).tolist(), strict=True))


def figures_of(answers, steps=1):
    """Return the figures of a contestant from its answers to timed turns of so many steps: percentiles, median_cpu_s of all
    threads, and from the last answer peak_mib and flops."""
    seconds, cpu = ([answer[key] / steps for answer in answers] for key in ('seconds', 'cpu_seconds'))
    return percentiles(seconds) | {'median_cpu_s': round(float(np.median(cpu)), 7)} | {
        key: answers[-1][key] for key in ('peak_mib', 'flops') if key in answers[-1]}


def print_figures(title, figures, amount, unit, names=NAMES):
    """Print a line per contestant, with its ratio to the first.  amount: number of `unit` per measurement."""
    with_cpu = all('median_cpu_s' in f for f in figures.values())
    cpu = f' {"CPU time":>11}' * with_cpu
    print(f'{title:20} {"median":>10} {"p20":>10} {"p80":>10}{cpu} {unit + "/s":>12} {"peak MiB":>9} {"to first":>9}')
    first = next(iter(figures.values()))
    for kind, f in figures.items():
        times = ''.join(f'{1e3 * f[name]:8.2f} ms' for name in ('median_s', 'p20_s', 'p80_s'))
        if with_cpu:
            times += f' {1e3 * f["median_cpu_s"]:8.2f} ms'
        print(f'{names[kind]:20}{times} {amount / f["median_s"]:12.0f} {f["peak_mib"]:9.0f} '
              f'{f["median_s"] / first["median_s"]:8.2f}x')
