"""Write the table of names in docs/names.md: the methods of NDArray and Tensor, and numpy's and PyTorch's of the same name.

    python -m scripts.name_table            update the page; needs PyTorch
    python -m scripts.name_table --check    write nothing; exit with status 2 if the page is out of date
"""
from pathlib import Path

import numpy as np

from pyops import functional
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser
from pyops.ndarray import NDArray
from scripts.generated import update

PROGRAM = 'scripts.name_table'
PAGE = Path(__file__).resolve().parents[1] / 'docs/names.md'
OPERATORS = {'+': 'add', '-': 'sub', '*': 'mul', '/': 'truediv', '//': 'floordiv', '%': 'mod', '**': 'pow', '@': 'matmul',
             '&': 'and', '|': 'or', '^': 'xor', '~': 'invert', '==': 'eq', '!=': 'ne', '<': 'lt', '<=': 'le', '>': 'gt',
             '>=': 'ge'}
# of one class alone: memory, devices, the tape
OWN = {'as_strided', 'add_at', 'array', 'bits_of', 'buffer', 'compact', 'is_compact', 'is_mask', 'kernel_view', 'location',
       'offset', 'pointer', 'put', 'stored', 'kind', 'origin', 'of_results', 'tape', 'take_rows'}
# where numpy's and PyTorch's meaning differ, or ours from both
NOTES = {
    'transpose': 'permutes the axes, as numpy; two axes of more than two are exchanged, as in PyTorch',
    'repeat': "repeats each element, as numpy; PyTorch's `repeat` is `tile`",
    'sort': 'returns a sorted copy, as `np.sort`; `F.sort` also returns the indices, as PyTorch',
    'split': "sizes of the pieces, as PyTorch; `np.split(x, ...)` takes numpy's arguments",
    'var': 'divides by n - ddof with ddof=0, as numpy; `F.var` by n - 1, as PyTorch',
    'std': 'as `var`',
    'max': 'the values alone, as numpy; `argmax` has the indices',
    'min': 'the values alone, as numpy',
    'take': 'of the flattened array without an axis, as in numpy and PyTorch',
    'flip': 'all axes if none is given, as numpy',
    'size': "the number of elements, as numpy; PyTorch's `size()` is `shape`",
    'argmax': 'int32; the first of equals', 'argmin': 'int32; the first of equals', 'argsort': 'int32; stable',
    'T': 'all axes in reverse order, as numpy',
    'cumsum': 'of the flattened array without an axis, as numpy',
    'squeeze': 'an axis of another size than 1 is a ValueError, as in numpy',
    'pad': '`np.pad` with constant_values; `F.pad` takes the widths of numpy or of PyTorch',
    'flatten': "`start_dim` and `end_dim` are PyTorch's; a view if strides allow it",
    'expand': 'also -1, as PyTorch', 'dot': "numpy's",
    'astype': 'float32, float64, int32 (any integer dtype), bool (a mask)',
    'dtype': 'of a mask: bool for a Tensor, for an NDArray the dtype of its memory',
    'copy': 'of a Tensor: gradients flow through it, as through `clone`',
    'floor': 'without a gradient', 'ceil': 'without a gradient', 'sign': 'without a gradient',
    '//': 'without a gradient', '&': 'masks and int32', '|': 'masks and int32', '^': 'masks and int32', '~': 'masks and int32',
    '==': 'returns a mask', '[]': 'integers, slices, None, Ellipsis: a view; with arrays, lists or masks: a copy, as numpy',
    '[] =': 'as numpy; of equal positions the last value counts',
}


def names():
    """Return the public names of both classes without the names of the tape and of memory."""
    public = {name for kind in (NDArray, Tensor) for name in dir(kind) if not name.startswith('_')}
    return sorted(sorted(public - OWN), key=str.lower)


def cell(name, kinds):
    """Return where a library has a name: 'x.name', 'module.name', or nothing."""
    return next((f'`{prefix}{name}`' for prefix, kind in kinds if hasattr(kind, name)), '')


def rows():
    """Yield (ours, NDArray, Tensor, F, numpy, PyTorch, note)."""
    import torch
    numpys = [('x.', np.ndarray), ('np.', np), ('np.linalg.', np.linalg)]
    torchs = [('x.', torch.Tensor), ('torch.', torch), ('F.', torch.nn.functional)]
    for symbol, name in OPERATORS.items():
        mark = [('yes' if hasattr(kind, f'__{name}__') else '') for kind in (NDArray, Tensor, np.ndarray, torch.Tensor)]
        yield (symbol, *mark[:2], '', *mark[2:], NOTES.get(symbol, ''))
    for symbol in ('[]', '[] ='):
        yield symbol, 'yes', 'yes', '', 'yes', 'yes', NOTES[symbol]
    for name in names():
        ours = ['yes' if hasattr(kind, name) else '' for kind in (NDArray, Tensor, functional)]
        yield (name, *ours, cell(name, numpys), cell(name, torchs), NOTES.get(name, ''))


def text():
    """Return the Markdown of the table."""
    lines = ['| name | NDArray | Tensor | F | numpy | PyTorch | note |', '|---|---|---|---|---|---|---|']
    for name, *cells in rows():
        line = ' | '.join([f'`{name}`'.replace('|', r'\|'), *cells])
        while '|  |' in f'| {line} |':
            line = f'| {line} |'.replace('|  |', '| |')[2:-2]
        lines.append(f'| {line} |'.replace('  |', ' |'))
    return '\n'.join(['', *lines, '', ''])


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Write the table of names in docs/names.md.')
    p.add_argument('--check', action='store_true', help='write nothing; exit with status 2 if the page is out of date')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help='page to update (default docs/names.md)')
    args = p.parse_args(argv)
    update(args.page, 'names', text(), f'python -m {PROGRAM}', args.check)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
