"""python -m pyops inspect draw|serve|compare|products|runs|export: the command line of this folder.

A command is a module with run(options) -> exit status.  It is imported when the command runs, so --help does not load its
dependencies.
"""
import argparse
import importlib

from pyops.flags import add_address_flags, non_negative_float, output_file
from pyops.inspect.choice import patterns, size, steps


def add_commands(parser):
    """Declare the commands of this module as subcommands of an ArgumentParser, and return the subcommands."""
    commands = parser.add_commands()
    _add_draw(commands.add_parser('draw', help='draw pictures, statistics and an interactive page of saved tensors'))
    _add_serve(commands.add_parser('serve', help='serve the interactive page, live, during a training run'))
    _add_compare(commands.add_parser('compare', help='rank the errors of number formats on saved tensors, worst first'))
    _add_products(commands.add_parser('products', help='rank the errors of products of saved tensors in every pair of formats'))
    _add_runs(commands.add_parser('runs', help='find the first step and action where training runs part'))
    _add_export(commands.add_parser('export', help='write saved tensors with the file names of other programs'))
    return commands


def _add_draw(parser):
    parser.add_argument('--tensor-dir', '--tensor_dir', required=True, type=_path, metavar='LOGS',
                        help='folder of saved tensors (required)')
    parser.add_argument('--output-dir', '--output_dir', required=True, type=_path, metavar='DRAW',
                        help='folder to write pictures and page to (required)')
    _add_choice(parser)
    parser.add_argument('--sentences', type=whole_number(0), default=3, metavar='N',
                        help='sentences per batch with attention maps (default %(default)s)')
    parser.add_argument('--limit', type=whole_number(0), default=200, metavar='N',
                        help='draw at most N tensors, attention maps and layers; 0: all; statistics cover all '
                        '(default %(default)s)')
    parser.add_argument('--jobs', type=whole_number(0), default=0, metavar='N',
                        help='drawing processes; 0: one per core (default %(default)s)')
    parser.add_argument('--no-page', dest='page', action='store_false', help='draw pictures only, without index.html')
    parser.add_argument('--page-max', type=size, default='64M', metavar='SIZE',
                        help='size of the data in index.html; to fit, maps get coarser and steps are left out '
                        '(default %(default)s)')
    parser.add_argument('--colours', choices=('largest', 'rms'), default='largest',
                        help='end of the colours of heatmaps: the largest value (without outliers), or 4 times the root mean '
                        'square of the values (default %(default)s)')
    parser.add_argument('--dpi', type=whole_number(40, 400), default=100, metavar='N',
                        help='dots per inch, 40 to 400 (default %(default)s)')
    parser.set_defaults(run=_runs('draw'))


def _add_serve(parser):
    parser.add_argument('logs', type=_path, nargs='+', metavar='LOGS',
                        help='folder of saved tensors, which may be created later; several are shown side by side, each as '
                        'FOLDER or NAME=FOLDER')
    add_address_flags(parser, 8765)
    parser.add_argument('--open', action='store_true', help='open the page in a browser')
    parser.set_defaults(run=_runs('serve'))


def _add_compare(parser):
    parser.add_argument('logs', type=_path, metavar='LOGS', help='folder of saved tensors')
    _add_choice(parser)
    parser.add_argument('--axis', type=_axis, metavar='N|tokens',
                        help='axis of the blocks; tokens: all axes but the last, as one (default: as in the run)')
    parser.add_argument('--sort', default='sqnr',
                        choices=('sqnr', 'cosine', 'error', 'underflow', 'saturation', 'overflow', 'poisoned', 'block'),
                        help='measure to sort by, after lost numbers; block: SQNR of the worst block (default %(default)s)')
    add_output_flags(parser)
    parser.add_argument('--per-block', type=output_file, metavar='FILE', help='also write a CSV file with one line per block')
    parser.add_argument('--save-codes', type=_path, metavar='DIR',
                        help='also write codes and scales of each tensor in each format to a safetensors file in DIR, and '
                        'print their histograms and standard deviations')
    parser.set_defaults(run=_runs('compare'))


def _add_products(parser):
    parser.add_argument('logs', type=_path, metavar='LOGS', help='folder of saved tensors')
    group = parser.group('formats and layers')
    group.add_argument('--formats', default='all', metavar='all|every|NAME[,NAME:OPTION=VALUE]',
                       help='number formats of each operand, such as none,mxfp8,mxfp4:scale=even; none: not rounded; all: '
                       'hifp8, mxfp8, mxfp4, bf16, fp16; every: all sixteen (default %(default)s)')
    _add_layers(group)
    _add_steps(group)
    parser.add_argument('--products', type=_products, default='fwd,dgrad,wgrad', metavar='NAME[,NAME]',
                        help='products: fwd (x by w), dgrad (g by w), wgrad (g by x) (default %(default)s)')
    parser.add_argument('--rows', type=whole_number(0), default=256, metavar='N',
                        help='rows of each result to compute, evenly spaced; 0: all (default %(default)s)')
    parser.add_argument('--accumulate', type=_accumulation, metavar='BITS[:EVERY]',
                        help='sum rounded products to BITS significant bits, 2 to 24, and add the sum to one in float32 after '
                        'EVERY terms, such as 14:128 (default: exact sums)')
    parser.add_argument('--sort', default='sqnr', choices=('sqnr', 'cosine', 'error', 'overflow'),
                        help='measure to sort by, after overflow; error: the largest error of an element, divided by the root '
                        'mean square of the result (default %(default)s)')
    add_output_flags(parser)
    parser.set_defaults(run=_runs('products'))


def _add_runs(parser):
    parser.add_argument('runs', type=_path, nargs='+', metavar='RUN',
                        help='folder of saved tensors, or NAME=FOLDER; the first is the reference of the others')
    parser.add_argument('--tolerance', type=non_negative_float, default=1e-5, metavar='X',
                        help='runs part where the root mean square of a difference, divided by the one of the reference, '
                        'exceeds X; 0: at any difference (default %(default)s)')
    group = parser.group('tensors')
    _add_layers(group)
    _add_tensor_names(group)
    _add_steps(group)
    parser.add_argument('--sort', default='worst', choices=('worst', 'order'),
                        help='worst: largest difference first; order: as the step computes the actions (default %(default)s)')
    add_output_flags(parser)
    parser.add_argument('--csv', type=output_file, metavar='FILE',
                        help='also write a CSV file with one line per pair of tensors')
    parser.add_argument('--page', type=_path, metavar='DIR',
                        help='also write DIR/index.html, the page with all runs side by side')
    parser.add_argument('--tensorboard', type=_path, metavar='DIR',
                        help='also write event files of TensorBoard to DIR/RUN: losses, and statistics of each tensor; one RUN '
                        'is enough then')
    parser.set_defaults(run=_runs('runs'))


def _add_export(parser):
    parser.add_argument('logs', type=_path, metavar='LOGS', help='folder of saved tensors')
    parser.add_argument('folder', type=_path, metavar='DIR', help='folder to write files of PyTorch to')
    parser.add_argument('--naming', choices=('te', 'megatron'), default='te',
                        help="te: as DumpTensors of TransformerEngine, linear layers only; megatron: as a fork of Megatron "
                        '(default %(default)s)')
    group = parser.group('tensors')
    _add_layers(group)
    _add_tensor_names(group)
    _add_steps(group)
    parser.set_defaults(run=_runs('export'))


def add_output_flags(parser):
    """--top, --json and -o of a command that prints a table."""
    parser.add_argument('--top', type=whole_number(1), metavar='N', help='number of lines (default 30; with --json all)')
    parser.add_argument('--json', action='store_true', help='print one JSON document instead of the table')
    parser.add_argument('-o', '--output', type=output_file, metavar='FILE', help='write to FILE instead of standard output')


def _add_choice(parser):
    """Add the flags that select formats and tensors."""
    group = parser.group('formats and tensors')
    group.add_argument('--formats', default='all', metavar='all|every|NAME[,NAME:OPTION=VALUE]',
                       help='number formats, such as mxfp8,mxfp4:scale=even; all: hifp8, mxfp8, mxfp4, bf16, fp16; every: all '
                       'sixteen (default %(default)s)')
    _add_layers(group)
    _add_tensor_names(group)
    _add_steps(group)


def _add_layers(group):
    group.add_argument('--layers', type=patterns, default=('*',), metavar='PATTERN',
                       help="layers, such as 'encoder.*' or linear_L3; several separated by commas (default *)")


def _add_tensor_names(group):
    group.add_argument('--names', type=patterns, default=('*',), metavar='PATTERN',
                       help="tensors, such as 'grad_*' or input,weight (default *)")


def _add_steps(group):
    group.add_argument('--steps', type=steps, metavar='A:B:S',
                       help="steps of Python's range(A, B, S); or numbers separated by commas (default: all)")


def _path(text):
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got ''")
    return text


def _products(text):
    names = ('fwd', 'dgrad', 'wgrad')
    chosen = [part.strip() for part in text.split(',')]
    if not set(chosen) <= set(names):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, separated by commas, got '{text}'")
    return tuple(name for name in names if name in chosen)


def _accumulation(text):
    numbers = text.split(':')
    is_valid = len(numbers) < 3 and all(n.isascii() and n.isdigit() and 0 < len(n) < 8 for n in numbers)
    if not is_valid or not 2 <= int(numbers[0]) <= 24 or not int(numbers[-1]):
        raise argparse.ArgumentTypeError('expected 2 to 24 significant bits and a number of terms, such as 14:128, got '
                                         f"'{text}'")
    return tuple(map(int, numbers))


def _axis(text):
    if text == 'tokens':
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, such as -1, or tokens, got '{text}'") from None


def whole_number(least, most=10**6):
    """Return an argparse type for integers from `least` to `most`."""
    def convert(text):
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got '{text}'")
        return int(text)
    return convert


def _runs(module):
    return lambda options: importlib.import_module(f'pyops.inspect.{module}').run(options)
