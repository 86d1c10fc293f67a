"""Count the kernel launches of a training step on a GPU, on the emulator, which runs no kernel: real sizes take seconds.

    python -m bench.launches                                each program, in float32, in bfloat16, and in FP8 if it can
    python -m bench.launches transformer --precision bf16   one of them
    python -m bench.launches base --precision fp8           with the recipe of --precision fp8 (docs/cuda.md)
    python -m bench.launches base --list                    with the launches in order
    python -m bench.launches mnist                          of a hundred steps of the digits, all in one launch
    python -m bench.launches transformer --estimate         the time of its kernels on an H100, and of the gaps between them
    python -m bench.launches --write                        write these tables to docs/cuda.md

The program's launches are counted, the log included, on a device with 132 multiprocessors and compute capability 9.0.
Requires `make emulated`.

--estimate measures nothing.  The time of a kernel is computed from its operations and bytes, and from the rates below.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'bench.launches'
ROOT = Path(__file__).resolve().parents[1]
HEADER = 'pyops/device.h'                              # of the CUDA library, copied by make
STEPS = 'seq2seq', 'transformer', 'base', 'gpt2', 'mnist'       # the sections of bench.gpu
PRECISIONS = 'fp32', 'tf32', 'bf16', 'fp8'
IN_FP8 = 'transformer', 'base'                         # the steps of the program with --precision fp8
PAGE = ROOT / 'docs' / 'cuda.md'
# whose estimates --write puts there
ON_PAGE = ('seq2seq', 'bf16'), ('transformer', 'bf16'), ('transformer', 'fp8'), ('base', 'bf16'), ('base', 'fp8')

# Assumptions of --estimate, for an H100 SXM: no GPU was available to measure them.
BANDWIDTH = 0.8 * 3.35e12                              # bytes a second
OF_PEAK = 0.6
RATES = {'fp32': OF_PEAK * 67e12, 'tf32': OF_PEAK * 494.5e12, 'bf16': OF_PEAK * 989e12,     # operations of products a second
         'fp8': OF_PEAK * 1979e12}
CYCLE = 1 / 1.755e9                                    # seconds
LEAST = 1500 * CYCLE                                   # of a kernel, and of a step of a GRU, whose blocks wait for each other
GAP = 4000 * CYCLE                                     # from the end of a kernel to the start of the next (gemm.cu)
HIDDEN = 0.5                                           # share of a gap that an early start hides
LOGIT_BYTES = {'fp32': 12, 'tf32': 12, 'bf16': 10}     # written and read for each (docs/output_layer.md)
REST = {'fp8': 'bf16'}                                 # the precision of the products that are not in FP8
H100 = {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_SYNC': '0', 'PYOPS_EARLY_START': '1', 'EMU_MULTIPROCESSORS': '132',
        'EMU_MEMORY': str(80 * 2**30), 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


class Launch(NamedTuple):
    kernel: str             # without template arguments
    grid: str               # blocks: 'x,y,z'
    threads: int            # per block
    shared: int             # bytes of dynamic shared memory per block
    early: bool             # whether it may start before the last one has ended (PYOPS_EARLY_START)
    address: int            # in the emulated library, as nm prints it


class Call(NamedTuple):
    """A call of a function of the library in a step."""
    function: str           # without pyops_
    flops: float            # operations of its matrix products
    bytes: float            # read and written
    steps: int              # of its recurrence, 1 without one
    launches: list          # Launches

    def seconds(self, precision):
        """Return the estimated time of its kernels, without the gaps between them.   precision: of the step"""
        rate = RATES['fp8' if self.function == 'gemm_fp8' else REST.get(precision, precision)]
        return max(self.flops / rate, self.bytes / BANDWIDTH, LEAST * max(self.steps, len(self.launches)))


def launches(step, precision='fp32'):
    """Return the Launches of a training step, in order.  step: one of STEPS;  mnist: of many steps, see steps_of"""
    return counted(step, precision)[0]


def counted(step, precision):
    """Return the Launches of a training step, and its Calls, none of mnist."""
    found, output = listed([sys.executable, '-m', PROGRAM, step, '--precision', precision, '--run'])
    (first, end), calls = json.loads(output.splitlines()[-1])
    return found[first:end], [Call(*about, found[first:end]) for *about, (first, end) in calls]


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
    if step == 'mnist':
        if given not in (None, 'fp32'):
            raise UserError(f'--precision {given}: mnist computes its steps in float32; leave it out')
        return ['fp32']
    if given == 'fp8' and step not in IN_FP8:
        raise UserError(f'--precision fp8: {step} has no layers that multiply in FP8; name {" or ".join(IN_FP8)}, or give bf16')
    return [given] if given else ['fp32', 'bf16'] + ['fp8'] * (step in IN_FP8)


def steps_in(precision, is_estimate):
    """Return the steps to count if none is named.   precision: --precision, None for all"""
    if precision == 'fp8':
        return IN_FP8
    return STEPS if precision in (None, 'fp32') and not is_estimate else STEPS[:-1]


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
    return (first, launched(device)), []


def run(step, precision):
    """Train a step on random data.  Return the numbers of launches before and after it, and of its calls the arguments of Call,
    with these two numbers as launches."""
    if step == 'mnist':
        return run_mnist()
    import numpy as np

    from bench import gpu
    from bench.gpu_contest import precision_of
    from pyops.quantization import FP8_RECIPE, family_of
    training, config, batch, *_ = gpu.training_of(step, gpu.FULL)
    with precision_of(precision, stores_bf16=True) as device:
        if precision == 'fp8':
            config = replace(config, ops=family_of({'quant': FP8_RECIPE}))
        data, rows = training.data(np.random.default_rng(0), config, batch), np.arange(batch)
        trained = training.trained(config, data, None)
        first = launched(device)
        trained.steps(rows)
        end = launched(device)
        given = data.filled(rows) if hasattr(data, 'filled') else (rows,)       # as the step does
        return (first, end), list(calls_of(trained.steps.plan(*given), device, precision))


def calls_of(plan, device, precision):
    """Yield [function, operations, bytes, steps, (first, end)] for each action of a plan.

    No kernel runs, so arrays have no contents: all rows count, all sentences are as long as the longest, and all tokens differ.
    """
    import numpy as np

    from pyops.backend.kernels import KERNELS, Kernel
    from pyops.profile import operations

    def argument(action, name):
        if name in ('q_offsets', 'k_offsets', 'lengths'):
            return None
        given = plan.argument(action, name)
        return {'valid': lambda: [action.scalars['R']], 'ids': lambda: np.arange(given.size)}.get(name, lambda: given)()

    for i, action in enumerate(plan.replayed):
        kernel, scalars = KERNELS.get(action.kernel, Kernel()), action.scalars
        count = sum(tensor.nbytes for name, tensor in action.tensors.items() if name != 'work')
        if kernel.bytes:
            count = kernel.bytes(scalars)
        if action.kernel == 'linear_cross_entropy':
            count += LOGIT_BYTES[REST.get(precision, precision)] * scalars['R'] * scalars['V']
        first = launched(device)
        plan.run(i, i + 1)
        end, flops = launched(device), float(operations(action, argument))
        if action.kernel == 'linear_residual_norm':
            yield from of_residual_norm(action.tensors, flops, first, end)
        else:
            steps = int(scalars['T']) if action.kernel.startswith('gru_') else 1
            yield action.kernel, flops, float(count), steps, (first, end)


def of_residual_norm(tensors, flops, first, end):
    """Yield a product and a norm as two calls, as calls_of() does: of wgmma, the product adds the residual."""
    def count(names):
        return float(sum(tensors[name].nbytes for name in names.split() if name in tensors))
    joined = launch_lines()[first].startswith('hopper_tiles') and tensors['sum'].dtype.itemsize == 2
    product, norm = ('x weight bias sum', 'y sum mean rstd norm_weight norm_bias')
    one, other, product, norm = (('linear_residual', 'layer_norm_forward', f'{product} residual', norm) if joined else
                                 ('gemm', 'residual_norm_forward', product, f'{norm} residual sum'))
    yield one, flops, count(product), 1, (first, end - 1)
    yield other, 0.0, count(norm), 1, (end - 1, end)


def estimate(step, precision, found, calls):
    """Return a Markdown table of the estimated times of a step's kernels, by function, and of the gaps before them.

    found, calls: of counted()
    """
    functions = {}
    for call in calls:
        functions.setdefault(call.function, []).append(call)
    seconds = {name: sum(call.seconds(precision) for call in group) for name, group in functions.items()}
    lines = [f'| `{step}`, {precision} | launches | GFLOP | MB | kernels, us | gaps, us | hidden by early starts, us |',
             '|---|---:|---:|---:|---:|---:|---:|']

    def line(name, group, time):
        made = [launch for call in group for launch in call.launches]
        early = sum(launch.early for launch in made)
        figures = (sum(call.flops for call in group) / 1e9, sum(call.bytes for call in group) / 1e6, 1e6 * time,
                   1e6 * GAP * len(made), 1e6 * GAP * HIDDEN * early)
        lines.append(f'| {name} | {len(made)} | ' + ' | '.join(f'{figure:.1f}' for figure in figures) + ' |')
    for name, group in sorted(functions.items(), key=lambda item: -seconds[item[0]]):
        line(f'`{name}`', group, seconds[name])
    line('all', calls, sum(seconds.values()))
    whole = sum(seconds.values()) + GAP * len(found)
    hidden = GAP * HIDDEN * sum(launch.early for launch in found)
    of_peak = OF_PEAK * sum(call.flops for call in calls) / RATES[REST.get(precision, precision)] / (whole - hidden)
    of_rest = f' of {REST[precision]}' if precision in REST else ''
    lines += ['', f'A step of `{step}` in {precision} would take {1e6 * whole:.0f} us, and {1e6 * (whole - hidden):.0f} with '
              f'early starts: {100 * hidden / whole:.0f} % less, at {100 * of_peak:.0f} % of the peak FLOP/s{of_rest}.']
    return '\n'.join(lines)


def launched(device):
    """Return the number of launches so far."""
    device.synchronize()
    return len(launch_lines())


def launch_lines():
    """Return the lines of the emulator's list of launches."""
    return Path(os.environ['EMU_LAUNCHES']).read_text().splitlines()


def write(page=PAGE):
    """Write the estimates of ON_PAGE to a page."""
    text = '\n\n'.join(estimate(step, precision, *counted(step, precision)) for step, precision in ON_PAGE)
    update(page, 'estimates', f'\n{text}\n\n', f'python -m {PROGRAM} --write')


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('steps', nargs='*', metavar='STEP', help=f'{", ".join(STEPS)} (default: all)')
    p.add_argument('--precision', choices=PRECISIONS, help=f'default: fp32, bf16, and for {" and ".join(IN_FP8)} fp8')
    p.add_argument('--list', action='store_true',
                   help='print each launch: kernel, blocks, threads, bytes of shared memory, whether it can start early')
    p.add_argument('--estimate', action='store_true', help='estimate the time of the kernels on an H100, from operations and '
                   'bytes, and what early starts hide')
    p.add_argument('--write', action='store_true', help=f'write these estimates to docs/{PAGE.name}, of '
                   + ', '.join(f'{step} in {precision}' for step, precision in ON_PAGE))
    p.add_argument('--run', action='store_true', help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    for step in args.steps:
        if step not in STEPS:
            p.error(f'{step}: expected {", ".join(STEPS)}')
    if args.run:
        return print(json.dumps(run(args.steps[0], args.precision)))
    if args.write:
        if args.steps or args.precision or args.list:
            p.error('--write: the steps are chosen; give it alone')
        return write()
    if args.estimate and 'mnist' in args.steps:
        p.error('--estimate: mnist is one launch; name other steps')
    for step in args.steps or steps_in(args.precision, args.estimate):
        steps = f', {steps_of(step)} steps' * (steps_of(step) > 1)
        for precision in precisions_of(step, args.precision):
            found, calls = counted(step, precision)
            if args.estimate:
                print(estimate(step, precision, found, calls), end='\n\n', flush=True)
                continue
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
