"""Count the kernel launches of a training step on a GPU, on the emulator, which runs no kernel: real sizes take seconds.

    python -m bench.launches                                each program, in float32 and in bfloat16
    python -m bench.launches transformer --precision bf16   one of them
    python -m bench.launches base --list                    with the launches in order
    python -m bench.launches mnist                          of a hundred steps of the digits, all in one launch

The program's launches are counted, the log included, on a device with 132 multiprocessors and compute capability 9.0.
Requires `make emulated`.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'bench.launches'
ROOT = Path(__file__).resolve().parents[1]
HEADER = 'pyops/device.h'                              # of the CUDA library, copied by make
STEPS = 'seq2seq', 'transformer', 'base', 'gpt2', 'mnist'       # the sections of bench.gpu
PRECISIONS = 'fp32', 'tf32', 'bf16'
H100 = {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_SYNC': '0', 'PYOPS_EARLY_START': '1', 'EMU_MULTIPROCESSORS': '132',
        'EMU_MEMORY': str(80 * 2**30), 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


class Launch(NamedTuple):
    kernel: str             # without template arguments
    grid: str               # blocks: 'x,y,z'
    threads: int            # per block
    shared: int             # bytes of dynamic shared memory per block
    early: bool             # whether it may start before the last one has ended (PYOPS_EARLY_START)
    address: int            # in the emulated library, as nm prints it


def launches(step, precision='fp32'):
    """Return the Launches of a training step, in order.  step: one of STEPS;  mnist: of many steps, see steps_of"""
    found, output = listed([sys.executable, '-m', PROGRAM, step, '--precision', precision, '--run'])
    first, end = json.loads(output.splitlines()[-1])
    return found[first:end]


def listed(command):
    """Return the Launches of a process, which runs no kernel, and its output."""
    if not (ROOT / HEADER).exists():                    # a library may be there without it, from a copied folder
        raise UserError(f'{HEADER}: no such file; run `make emulated`')
    with tempfile.NamedTemporaryFile('r') as file:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | H100 | {'EMU_LAUNCHES': file.name}, capture_output=True,
                              text=True)
        if done.returncode:
            raise UserError(f'{" ".join(command)}: {(done.stderr.strip().splitlines() or ["failed"])[-1]}')
        lines = file.read().splitlines()
    return [Launch(re.sub(r'[(<].*', '', kernel.lstrip('(')), grid, int(threads), int(shared), early == '1', int(address, 16))
            for kernel, grid, threads, shared, _, early, address in (line.split('\t') for line in lines)], done.stdout


def steps_of(step):
    """Return the number of training steps whose launches are counted together."""
    from mnist.train import AT_ONCE_ON_GPU
    return AT_ONCE_ON_GPU if step == 'mnist' else 1


def precisions_of(step, given):
    """Return the precisions to count a step in.   given: --precision, None for all"""
    if step != 'mnist':
        return [given] if given else ['fp32', 'bf16']
    if given not in (None, 'fp32'):
        raise UserError(f'--precision {given}: mnist computes its steps in float32; leave it out')
    return ['fp32']


def run_mnist():
    """Train many steps on random images, as mnist.train does.  Return the numbers of launches before and after them."""
    import numpy as np

    from mnist.train import prepare
    from pyops.data.batches import batches
    from pyops.fit import History
    from pyops.ndarray import use_gpu
    from pyops.steps import Steps
    device, rng, size, count = use_gpu(), np.random.default_rng(0), 100, steps_of('mnist')
    images = rng.integers(0, 256, (size * count, 784)).astype(np.uint8)
    model, optimizer, step, inputs = prepare(images, rng.integers(0, 10, len(images)).astype(np.int32))
    history = History()

    def logged_steps(rows):
        for losses, norms in step.each(rows, size):
            history.add(losses, None, norms)
    steps = Steps(logged_steps, model.params, **inputs, **optimizer.arrays(), **history.arrays())
    rows = next(batches(len(images), size, 0, 0, at_once=count))
    steps.plan(rows)                                    # recorded
    first = launched(device)
    steps(rows)
    return first, launched(device)


def run(step, precision):
    """Train a step on random data.  Return the numbers of launches before and after it."""
    if step == 'mnist':
        return run_mnist()
    import numpy as np

    from bench import gpu
    from bench.gpu_contest import precision_of
    training, config, batch, *_ = gpu.training_of(step, gpu.FULL)
    with precision_of(precision, stores_bf16=True) as device:
        trained = training.trained(config, training.data(np.random.default_rng(0), config, batch), None)
        first = launched(device)
        trained.steps(np.arange(batch))
        return first, launched(device)


def launched(device):
    """Return the number of launches so far."""
    device.synchronize()
    return len(Path(os.environ['EMU_LAUNCHES']).read_text().splitlines())


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('steps', nargs='*', metavar='STEP', help=f'{", ".join(STEPS)} (default: all)')
    p.add_argument('--precision', choices=PRECISIONS, help='default: fp32 and bf16')
    p.add_argument('--list', action='store_true',
                   help='print each launch: kernel, blocks, threads, bytes of shared memory, whether it can start early')
    p.add_argument('--run', action='store_true', help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    for step in args.steps:
        if step not in STEPS:
            p.error(f'{step}: expected {", ".join(STEPS)}')
    if args.run:
        return print(json.dumps(run(args.steps[0], args.precision)))
    for step in args.steps or (STEPS if args.precision in (None, 'fp32') else STEPS[:-1]):
        steps = f', {steps_of(step)} steps' * (steps_of(step) > 1)
        for precision in precisions_of(step, args.precision):
            found = launches(step, precision)
            kernels = collections.Counter(launch.kernel for launch in found)
            early = sum(launch.early for launch in found)
            print(f'{step} {precision}{steps}: {len(found)} launches, {early} can start early: '
                  + ', '.join(f'{name} {count}' for name, count in kernels.most_common()), flush=True)
            for launch in found if args.list else ():
                print(f'  {launch.kernel:<24} {launch.grid:>12} {launch.threads:>5} {launch.shared:>7}'
                      + '  early' * launch.early)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
