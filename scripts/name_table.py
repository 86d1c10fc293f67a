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
from pyops.torch_methods import IN_PLACE
from scripts.generated import paragraph, update

PROGRAM = 'scripts.name_table'
PAGE = Path(__file__).resolve().parents[1] / 'docs/names.md'
OPERATORS = {'+': 'add', '-': 'sub', '*': 'mul', '/': 'truediv', '//': 'floordiv', '%': 'mod', '**': 'pow', '@': 'matmul',
             '&': 'and', '|': 'or', '^': 'xor', '~': 'invert', '==': 'eq', '!=': 'ne', '<': 'lt', '<=': 'le', '>': 'gt',
             '>=': 'ge', '<<': 'lshift', '>>': 'rshift', 'divmod': 'divmod'}
# of one class alone: memory, devices, the tape
OWN = {'as_strided', 'add_at', 'array', 'bits_of', 'buffer', 'compact', 'is_compact', 'is_mask', 'kernel_view', 'location',
       'offset', 'pointer', 'put', 'stored', 'kind', 'origin', 'of_results', 'tape', 'take_rows',
       'cached_data', 'realize_cached_data', 'make_const'}
# where numpy's and PyTorch's meaning differ, or ours from both
NOTES = {
    'transpose': 'permutes the axes, as numpy; two axes of more than two are exchanged, as in PyTorch',
    'repeat': "repeats each element, as numpy; PyTorch's `repeat` is `tile`",
    'sort': 'returns a sorted copy, as `np.sort`; `F.sort` also returns the indices, as PyTorch',
    'split': "sizes of the pieces, as PyTorch; `np.split(x, ...)` takes numpy's arguments",
    'var': 'divides by n - ddof with ddof=0, as numpy; `F.var` by n - 1, as PyTorch',
    'std': 'as `var`',
    'half': 'a `TypeError` that says what there is in its place', 'bfloat16': 'as `half`',
    'aminmax': 'a tuple', 'cummax': 'with int32 indices', 'cummin': 'with int32 indices', 'kthvalue': 'with int32 indices',
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
    'median': 'the mean of the middle two, as numpy; `F.median` the smaller of them, as PyTorch',
    'nonzero': 'an array per axis, as numpy; `F.nonzero` and `argwhere` one of rows, as PyTorch',
    'unique': "numpy's arguments; without a gradient", 'mode': 'with int32 indices', 'inverse': 'computed in float64',
    'copysign': 'the sign has no gradient', 'heaviside': 'without a gradient',
    'searchsorted': "numpy's; `F.searchsorted` is PyTorch's",
    'floor_divide': 'without a gradient', 'trunc': 'without a gradient', 'bincount': 'without a gradient',
    'scatter': 'of equal places the last counts', 'float_power': 'float64; in place the dtype of x',
    'is_leaf': "a bool, as in PyTorch; needle's `x.is_leaf()` cannot be called",
    'share_memory_': 'of a Parameter a `TypeError`',
    '==': 'returns a mask', '[]': 'integers, slices, None, Ellipsis: a view; with arrays, lists or masks: a copy, as numpy',
    '[] =': 'as numpy; of equal positions the last value counts',
}


def names():
    """Return the public names of both classes without the names of the tape and of memory."""
    public = {name for kind in (NDArray, Tensor) for name in dir(kind) if not name.startswith('_')}
    in_place = {f'{name}_' for name in IN_PLACE}            # listed with the methods
    return sorted(sorted(public - OWN - in_place), key=str.lower)


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
        twin = f'also `{name}_`' if name in IN_PLACE else ''
        yield (name, *ours, cell(name, numpys), cell(name, torchs), '; '.join(filter(None, (NOTES.get(name, ''), twin))))


# names that both classes lack -> what to write in their place; any other one has no counterpart
REMEDIES = {
    **dict.fromkeys(('swapaxes_', 'swapdims_', 'resize_', 'resize', 'resize_as_'),
                    '`x = x.reshape(...)`; of a Tensor `unsqueeze_`, `squeeze_`, `transpose_`, `t_`'),
    **dict.fromkeys(('byte', 'char', 'short'), 'dtypes are float32, float64, int32 and bool'),
    **dict.fromkeys(('is_cpu', 'to_device'), "`x.to('cuda')`, `x.device`"),
    **dict.fromkeys(('storage', 'untyped_storage', 'storage_offset', 'base', 'ctypes', 'flags', 'strides'),
                    '`x.stride()`, `x.data_ptr()`; of an NDArray also `buffer`, `offset`, `strides`'),
    **dict.fromkeys(('pin_memory', 'is_pinned'), 'not needed: copies to a GPU do not wait for it'),
    **dict.fromkeys(('real', 'imag', 'conj', 'conjugate', 'angle', 'adjoint', 'H', 'mH'),
        'there are no complex numbers; `x.mT`'),
    **dict.fromkeys(('cholesky', 'qr', 'svd', 'pinverse', 'lu_solve'), '`pyops.linalg` on `x.detach()`: without a gradient'),
    **dict.fromkeys(('nanmedian', 'nanquantile', 'histogram', 'partition', 'argpartition'),
                    '`x.sort()`, `x.topk()`, `x.median()`; numpy\'s function on `x.detach()`'),
    **dict.fromkeys(('put_', 'masked_scatter_'), '`y = x.clone(); y[index] = values`, with a gradient'),
    **dict.fromkeys(('tofile', 'dump', 'dumps', 'byteswap'), '`x.tobytes()`, `pickle`, `np.save`'),
    **dict.fromkeys(('choose', 'flat'), '`where`, `x.reshape(-1)`'),
    'multinomial': '`pyops.multinomial(x, n)`', 'retains_grad': '`x.retain_grad()`'}


def missing():
    """Return [(remedy, names with it)], and the other public names of numpy's and PyTorch's arrays that both classes lack."""
    import torch
    theirs = {name for kind in (np.ndarray, torch.Tensor) for name in dir(kind) if not name.startswith('_')}
    left = sorted(name for name in theirs if not (hasattr(NDArray, name) or hasattr(Tensor, name)))
    known = {}
    for name in left:
        if name in REMEDIES:
            known.setdefault(REMEDIES[name], []).append(name)
    # not listed: names in place of other names listed, and names of sparse, quantized and foreign layouts
    others = [name for name in left if name not in REMEDIES and not (name.endswith('_') and name[:-1] in theirs)
              and not name.startswith(('is_', 'q_', 'to_', 'sparse', 'set', 'get')) and 'indices' not in name]
    return sorted(known.items(), key=lambda item: item[1]), others


def missing_text():
    """Return the Markdown of the names that are missing."""
    known, others = missing()
    lines = ['| missing | in their place |', '|---|---|']
    lines += [f'| {", ".join(f"`{name}`" for name in found)} | {remedy.replace("|", chr(92) + "|")} |' for remedy,
        found in known]
    return '\n'.join(['', *lines, '', paragraph('Without a counterpart: ' + ', '.join(f'`{name}`' for name in others) + '.'),
        '', ''])


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
    update(args.page, 'missing', missing_text(), f'python -m {PROGRAM}', args.check)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
