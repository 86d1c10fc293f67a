"""Replace kernels by wrong ones in turn, and count those that the op table rejects, or for kernels that it does not launch the
tests of strided arrays, float64 and optimisers.

    python -m scripts.mutants                   print a table of all kernels and the survivors
    python -m scripts.mutants gemm --save       of one kernel; --save also writes the counts to docs/reliability.md
"""
import os
import sys
import time
from collections import Counter

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import paragraph
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.mutants'
# Outputs with mutants that these tests do not reject, and the reason.
EXPLAINED = {
    'batch_norm_forward.running_mean': 'written in training only, which tests/ops/test_ops.py compares with PyTorch',
    'batch_norm_forward.running_var': 'written in training only, which tests/ops/test_ops.py compares with PyTorch',
    'conv2d_backward_weight_double.dweight': 'adds to zeros',
    'conv2d_backward_x_double.dx': 'adds to zeros',
    'conv2d_forward_double.y': 'adds to zeros',
    'embedding_backward.touched': 'the blocks of sparse gradients, in tests/training/test_plan.py',
    'fill.y': 'ops fill with zeros only',
    'gru_backward.dgates': 'read when tensors are saved, in tests/inspect/test_saving.py',
    'linear_cross_entropy.valid': 'the number of rows that count, in tests/ops/test_ops.py',
    'pixel_linear_forward.places': 'has more columns than an image has pixels',
    'rnn_backward.dgates': 'read when tensors are saved, in tests/inspect/test_saving.py',
    'scatter_rows.y': 'rows written at their indices, in tests/backend/test_kernels.py',
    'zero_touched.grad': 'the blocks of sparse gradients, in tests/training/test_plan.py',
    'zero_touched.touched': 'the blocks of sparse gradients, in tests/training/test_plan.py',
    'unpad_rows.last': 'the last states of sentences, in tests/ops/test_packed_gru.py'}


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Test the tests of ops with wrong kernels.')
    p.add_argument('kernels', nargs='*', metavar='KERNEL', help='only mutants of these kernels (default: all of the op table)')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'         # also for torch: see mutants.is_killed
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', 'ops', '')]
    import mutants

    from pyops import backend
    table = mutants.launches().rows
    known = table.keys() if args.kernels and set(args.kernels) <= table.keys() else table.keys() | mutants.others()[0].keys()
    if unknown := set(args.kernels) - known:
        raise UserError(f'{min(unknown)}: no kernel that these tests launch; expected one of {", ".join(sorted(known))}')
    start, tried, killed, survivors = time.perf_counter(), Counter(), Counter(), []
    backend.set_threads(1)
    last = None
    for mutant in mutants.mutants(args.kernels or None):
        if mutant.kernel != last:
            mutants.prime(mutant.kernel)
            last = mutant.kernel
        tried[mutant.kind] += 1
        if mutants.is_killed(mutant):
            killed[mutant.kind] += 1
        else:
            survivors.append(mutant)
            print(f'survives : {text_of(mutant)}', flush=True)
    kernels = len(args.kernels or known)
    print(f'{killed.total()} of {tried.total()} mutants of {kernels} kernels killed in {time.perf_counter() - start:.0f} s')
    if args.save:
        write('mutants', table(kernels, tried, killed, survivors), f'python -m {PROGRAM} --save')
    return int(any(f'{mutant.kernel}.{mutant.output}' not in EXPLAINED for mutant in survivors))


def text_of(mutant):
    """Return the name of a survivor, and the reason if it is known."""
    reason = EXPLAINED.get(f'{mutant.kernel}.{mutant.output}')
    return f'`{mutant}`' + (f' ({reason})' if reason else '')


def table(kernels, tried, killed, survivors):
    """Return the text of the page."""
    lines = [f'Of {kernels} kernels: {killed.total()} of {tried.total()} mutants are killed, '
             f'{killed.total() / tried.total():.1%}.', '', '| the output | mutants | killed |', '|---|---|---|']
    names = {'nothing': 'keeps its content', 'zeros': 'is 0', 'stale': 'comes from another call',
             'last row': 'keeps its last row', 'last column': 'keeps its last column', 'share': 'keeps the rows of one thread',
             'added': 'is added to its content'}
    lines += [f'| {names[kind]} | {tried[kind]} | {killed[kind]} |' for kind in tried]
    if survivors:
        outputs = Counter(f'{mutant.kernel}.{mutant.output}' for mutant in survivors)
        lines += ['', 'The table does not reject all mutants of', '']
        lines += [paragraph(f'`{output}` ({count}): {EXPLAINED.get(output, "not explained")}', '- ')
                  for output, count in outputs.items()]
    return '\n'.join([*lines, ''])


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
