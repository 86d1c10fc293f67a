"""python -m pyops inspect draw|serve|compare: the command line of this folder.

A command is a module with run(options) -> exit status, imported when it is called: --help needs none of what it builds on.
"""
import argparse
import importlib

from pyops.inspect.choice import patterns, size, steps
from pyops.training import output_file


def add_commands(parser):
    """Declare draw, serve and compare as subcommands of an ArgumentParser."""
    commands = parser.add_commands()
    _add_draw(commands.add_parser('draw', help='pictures, statistics and an interactive page of saved tensors'))
    _add_serve(commands.add_parser('serve', help='the interactive page, live, while a training run writes'))
    _add_compare(commands.add_parser('compare', help='what every number format does to saved tensors, worst first'))


def _add_draw(parser):
    parser.add_argument('--tensor-dir', '--tensor_dir', required=True, type=_path, metavar='LOGS',
                        help='where the tensors were saved')
    parser.add_argument('--output-dir', '--output_dir', required=True, type=_path, metavar='DRAW',
                        help='where pictures and page go')
    _add_choice(parser)
    parser.add_argument('--sentences', type=_number(0), default=3, metavar='N',
                        help='so many of each batch get attention maps (default 3)')
    parser.add_argument('--limit', type=_number(0), default=200, metavar='N',
                        help='tensors, attention maps and layers with pictures; statistics are of all (default 200, 0: all)')
    parser.add_argument('--jobs', type=_number(0), default=0, metavar='N', help='processes that draw (default 0: one a core)')
    parser.add_argument('--no-page', dest='page', action='store_false', help='pictures alone, without index.html')
    parser.add_argument('--page-max', type=size, default='64M', metavar='SIZE',
                        help='of the data in index.html; of more, maps get coarser and steps are left out (default 64M)')
    parser.add_argument('--dpi', type=_number(40, 400), default=100, metavar='N', help='dots per inch, 40 to 400 (default 100)')
    parser.set_defaults(run=_runs('draw'))


def _add_serve(parser):
    parser.add_argument('logs', type=_path, metavar='LOGS',
                        help='where the tensors are saved; waited for where it is not there yet')
    parser.add_argument('--port', type=_port, default=8765, metavar='N', help='to listen on; 0: any free one (default 8765)')
    parser.add_argument('--host', default='127.0.0.1', metavar='ADDRESS',
                        help='to listen on (default 127.0.0.1: this machine alone)')
    parser.add_argument('--open', action='store_true', help='show the page in a browser')
    parser.set_defaults(run=_runs('serve'))


def _add_compare(parser):
    parser.add_argument('logs', type=_path, metavar='LOGS', help='where the tensors were saved')
    _add_choice(parser)
    parser.add_argument('--axis', type=_axis, metavar='N|tokens',
                        help='along which axis blocks lie; tokens: all but the last, as one (default: as the run had it)')
    parser.add_argument('--sort', choices=('sqnr', 'cosine', 'error', 'underflow', 'saturation', 'block'), default='sqnr',
                        help='what the worst are the worst by; block: the SQNR of the worst block (default sqnr)')
    parser.add_argument('--top', type=_number(1), metavar='N', help='how many lines (default 30; of --json all)')
    parser.add_argument('--json', action='store_true', help='one JSON document in place of the table')
    parser.add_argument('-o', '--output', type=output_file, metavar='FILE', help='write there, not to standard output')
    parser.add_argument('--per-block', type=output_file, metavar='FILE', help='write a CSV file with a line for each block too')
    parser.set_defaults(run=_runs('compare'))


def _add_choice(parser):
    """Which formats, and of which tensors."""
    parser.add_argument('--formats', default='all', metavar='all|NAME[,NAME:OPTION=VALUE]',
                        help='number formats, such as mxfp8,mxfp4:scale=even (default all)')
    parser.add_argument('--layers', type=patterns, default=('*',), metavar='PATTERN',
                        help="layers, such as 'encoder.*' or linear_L3, or several with commas between (default *)")
    parser.add_argument('--names', type=patterns, default=('*',), metavar='PATTERN',
                        help="tensors, such as 'grad_*' or input,weight (default *)")
    parser.add_argument('--steps', type=steps, metavar='A:B:S',
                        help='steps: from A up to B, every S; or numbers with commas between (default all)')


def _path(text):
    if not text:
        raise argparse.ArgumentTypeError("want a name, got ''")
    return text


def _axis(text):
    if text == 'tokens':
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a number, such as -1, or tokens, got '{text}'") from None


def _number(least, most=10**6):
    """-> an argparse type: a whole number from `least` to `most`."""
    def convert(text):
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"want a whole number from {least} to {most}, got '{text}'")
        return int(text)
    return convert


def _runs(module):
    return lambda options: importlib.import_module(f'pyops.inspect.{module}').run(options)


def _port(text):
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"want a whole number from 0 to 65535, got '{text}'")
    return int(text)
