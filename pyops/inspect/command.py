"""python -m pyops inspect draw|serve|compare: the command line of this folder.

A command is a module with run(options) -> exit status, imported when it is called: --help needs none of what it builds on.
"""
import importlib


def add_commands(parser):
    """Declare draw, serve and compare as subcommands of an ArgumentParser."""
    commands = parser.add_subparsers(dest='inspect', required=True)
    _add_draw(commands.add_parser('draw', help='pictures, statistics and an interactive page of saved tensors'))
    _add_serve(commands.add_parser('serve', help='the interactive page, live, while a training run writes'))
    _add_compare(commands.add_parser('compare', help='what every number format does to saved tensors, worst first'))


def _add_draw(parser):
    parser.add_argument('--tensor-dir', '--tensor_dir', required=True, metavar='LOGS', help='where the tensors were saved')
    parser.add_argument('--output-dir', '--output_dir', required=True, metavar='DRAW', help='where pictures and page go')
    parser.set_defaults(run=_runs('draw'))


def _add_serve(parser):
    parser.add_argument('logs', metavar='LOGS', help='where the tensors are saved')
    parser.set_defaults(run=_runs('serve'))


def _add_compare(parser):
    parser.add_argument('logs', metavar='LOGS', help='where the tensors were saved')
    parser.set_defaults(run=_runs('compare'))


def _runs(module):
    return lambda options: importlib.import_module(f'pyops.inspect.{module}').run(options)
