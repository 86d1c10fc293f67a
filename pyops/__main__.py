"""Programs and tools, as `python -m pyops` or, once installed, as the command `pyops`.

python -m pyops doctor                      what is found on this machine, and a test of the kernels
python -m pyops train transformer ...       as python -m transformer.train; also translate, evaluate, average
python -m pyops plan mnist ...              every kernel and tensor of a training step: as train with --plan
python -m pyops data list|get               data sets: as python -m pyops.data
python -m pyops serve CKPT                  translations over HTTP
python -m pyops gradcheck [OP ...]          gradients of ops against central differences, all ops by default
python -m pyops inspect ...                 saved tensors: draw, serve, compare, products, runs, export, sensitivity
python -m pyops export ...                  a checkpoint in the format of another program
python -m pyops replay FILE                 a kernel call that --check-finite saved, again
python -m pyops rewind RUN --step N         any tensor of a past step of a run; also bisect, branch
python -m pyops bench NAME ...              as python -m bench.NAME in the source tree: measurements beside other libraries
python -m pyops exercises list|start|check  ops and kernels to complete, with their gradient checks
python -m pyops version                     versions of pyops, of its kernel header and of Python
python -m pyops completion bash|zsh         the completion script of a shell
"""
import argparse
import os.path
import sys
from pathlib import Path
from typing import NamedTuple

from pyops import programs
from pyops.errors import UserError, exits_cleanly


class Program(NamedTuple):
    """A command that runs a module of a program.   name: of the module;  flags: put before the user's"""
    text: str
    packages: tuple[str, ...]
    name: str
    flags: tuple[str, ...] = ()


PROGRAMS = {'train': Program('train a program, or resume a checkpoint', ('mnist', 'seq2seq', 'transformer'), 'train'),
            'plan': Program('print every kernel and tensor of a training step', ('mnist', 'seq2seq', 'transformer'), 'train',
                            ('--plan',)),
            'translate': Program('translate with a checkpoint', ('seq2seq', 'transformer'), 'translate'),
            'evaluate': Program('score a checkpoint: BLEU, chrF', ('seq2seq', 'transformer'), 'evaluate'),
            'average': Program('average checkpoints of a run', ('seq2seq', 'transformer'), 'average')}
MEASUREMENTS = 'kernels', 'train', 'translate', 'serve', 'ndarray', 'eager', 'convolution', 'floor', 'quality', 'scaling'


def main(arguments=None):
    """Run the command line.  Invalid input prints one line to stderr and exits with status 2."""
    with exits_cleanly('pyops'):
        status = run(arguments)
    sys.exit(status)


def parser():
    # imported here so that exits_cleanly can name a missing package in one line
    from pyops import completion, debugging, doctor, exercises
    from pyops.export import command as export
    from pyops.flags import ArgumentParser
    from pyops.inspect import command
    from pyops.serve import command as serve
    own_name = 'pyops' if os.path.basename(sys.argv[0]) == 'pyops' else 'python -m pyops'
    p = ArgumentParser(prog=own_name, description='Deep learning from the metal up: programs and tools.',
                       epilog=f'{own_name} COMMAND --help describes a command; {own_name} train mnist --help '
                              'lists the flags of a program.')
    commands = p.add_commands()
    doctor.add_flags(commands.add_parser('doctor', help='describe this machine and what pyops finds on it; test the kernels'))
    for name, program in PROGRAMS.items():
        module = ' '.join([f'python -m PROGRAM.{program.name}', *program.flags])
        started = commands.add_parser(name, help=program.text, description=f'{program.text}: as {module} in the source tree')
        started.add_argument('program', choices=program.packages, metavar='PROGRAM', help=' or '.join(program.packages))
        started.add_argument('flags', nargs=argparse.REMAINDER, metavar='...', help='flags of the program')
        started.set_defaults(run=lambda options, program=program: run_module(
            programs.module(f'{options.program}.{program.name}'), [*program.flags, *options.flags]))
    commands.add_parser('data', help='list and get data sets: as python -m pyops.data')
    check = commands.add_parser('gradcheck', help='check gradients of ops against central differences in float64')
    check.add_argument('ops', metavar='OP', nargs='*', help='name of an op, such as linear, gru or softmax (default: all)')
    check.add_argument('--json', action='store_true', help='print the results as one JSON document')
    check.set_defaults(run=gradcheck)
    inspected = command.add_commands(commands.add_parser(
        'inspect', help='look at saved tensors: draw, serve, compare, products, runs; and at the sensitivity of a model to '
        'formats'))
    sensitivity_flags(inspected.add_parser('sensitivity', help='measure what rounding each operand does to a training step; '
                                           'find a cheap recipe'))
    serve.add_flags(commands.add_parser('serve', help='translate with a checkpoint over HTTP'))
    debugging.add_replay_flags(commands.add_parser('replay', help='run a kernel call again that --check-finite saved'))
    debugging.add_rewind_flags(commands.add_parser('rewind', help='repeat a step of a run and print its tensors'))
    debugging.add_bisect_flags(commands.add_parser('bisect', help='find the first step of a run whose loss or gradient meets a '
                                                   'condition'))
    debugging.add_branch_flags(commands.add_parser('branch', help='train on from a past step of a run, beside it'))
    bench = commands.add_parser('bench', help='measure beside other libraries: as python -m bench.NAME in the source tree')
    bench.add_argument('name', choices=MEASUREMENTS, metavar='NAME', help=', '.join(MEASUREMENTS))
    bench.add_argument('flags', nargs=argparse.REMAINDER, metavar='...', help='flags of the measurement')
    bench.set_defaults(run=run_bench)
    exercises.add_commands(commands.add_parser('exercises', help='ops and kernels to complete, with their gradient checks'))
    export.add_commands(commands.add_parser('export', help='write a checkpoint in the format of another program'))
    version = commands.add_parser('version', help='print the versions of pyops, of its kernel header and of Python')
    version.add_argument('--json', action='store_true', help='print JSON')
    version.set_defaults(run=print_version)
    shell = commands.add_parser('completion', help='print the script with which a shell completes commands and flags',
                                description='Print a completion script. Add to ~/.bashrc: eval "$(pyops completion bash)"; to '
                                            '~/.zshrc, below compinit: eval "$(pyops completion zsh)"')
    completion.add_flags(shell)
    shell.set_defaults(run=lambda options: print(completion.script(options.shell, parser(), parsers_of_programs()), end=''))
    return p


def run_bench(options):
    if not (Path(__file__).parents[1] / 'bench' / f'{options.name}.py').exists():
        raise UserError('bench: measurements are no part of an installed package; run them in a copy of the source tree')
    run_module(f'bench.{options.name}', options.flags)


def parsers_of_programs():
    """Return {command: ArgumentParser} of the commands that run a module: 'train mnist', ..., 'data'."""
    from importlib import import_module
    found = {f'{command} {package}': import_module(programs.module(f'{package}.{program.name}')).parser()
             for command, program in PROGRAMS.items() for package in program.packages}
    return found | {'data': import_module('pyops.data.__main__').parser()}


def print_version(options):
    """Print the versions that a bug report needs, as text or JSON."""
    import platform

    from pyops import __version__
    from pyops.backend.library import ABI_VERSION
    found = {'pyops': __version__, 'abi': ABI_VERSION, 'python': platform.python_version()}
    if options.json:
        import json
        print(json.dumps(found))
    else:
        print(f'pyops {__version__}, ABI {ABI_VERSION}, Python {found["python"]}')


def sensitivity_flags(parser):
    """Declare the flags of pyops.sensitivity, which is imported when it runs, so that --help is quick."""
    import importlib

    from pyops.flags import fraction, non_negative_float, non_negative_int, output_file, positive_float, positive_int
    from pyops.inspect.choice import patterns
    from pyops.inspect.command import add_output_flags
    parser.add_argument('checkpoint', metavar='CKPT', help='a checkpoint, or a folder: its best or newest checkpoint')
    parser.add_argument('--formats', default='mxfp4,mxfp8', metavar='NAME[,NAME:OPTION=VALUE]',
                        help='number formats to try (default %(default)s)')
    parser.add_argument('--layers', type=patterns, default=('*',), metavar='PATTERN',
                        help="layers, such as 'encoder.*,output', as in --quant-layers (default *)")
    parser.add_argument('--operands', default='all', metavar='NAME[,NAME]',
                        help='operands, such as fwd,wgrad.g,attn.k, as in --quant (default %(default)s)')
    parser.add_argument('-f', '--corpus', metavar='FILE',
                        help='the corpus of the training run (default: fra-eng if found, else embedded)')
    parser.add_argument('--data-dir', metavar='DIR', help='search for fra-eng only in DIR (default: $PYOPS_DATA, then ./data)')
    parser.add_argument('--pairs', type=positive_int, default=64, metavar='N',
                        help='sentence pairs of the step, evenly spaced in the corpus (default %(default)s)')
    parser.add_argument('--replayed-steps', type=non_negative_int, default=0, metavar='K',
                        help='after the step, also make K updates with the same rounding, and report the loss after them: K '
                        'more steps for each operand (default %(default)s)')
    parser.add_argument('--lr', type=positive_float, metavar='X',
                        help='with --replayed-steps: learning rate of the updates (default: as in the training, or its --lr if '
                        'its schedule ends with the run)')
    parser.add_argument('--results', type=output_file, metavar='FILE',
                        help='append results to FILE; the same command continues an interrupted one')
    parser.add_argument('--search', type=non_negative_float, metavar='PERCENT',
                        help='search for the cheapest recipe with which the loss rises by at most PERCENT')
    parser.add_argument('--min-cosine', type=fraction, metavar='C',
                        help='with --search: smallest cosine of the gradient with the one without rounding (default 0.98)')
    parser.add_argument('--recipe', type=output_file, metavar='FILE',
                        help='with --search: write the recipe to FILE, for --quant @FILE')
    for library, name in ('te', 'TransformerEngine'), ('torchao', 'torchao'):
        parser.add_argument(f'--recipe-{library}', type=output_file, metavar='FILE',
                            help=f'with --search: write the recipe of the linear layers to FILE, for {name}')
    parser.add_argument('--sort', default='gradient', choices=('gradient', 'loss', 'replayed'),
                        help='sort by the cosine of the gradient, or by the rise of the loss, at once or after the replayed '
                        'steps (default %(default)s)')
    add_output_flags(parser)
    parser.set_defaults(run=lambda options: importlib.import_module('pyops.sensitivity').run(options))


def run(arguments):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ['data']:               # which has commands of its own
        return run_module('pyops.data', arguments[1:])
    options = parser().parse_args(arguments)
    return options.run(options)


def run_module(name, arguments):
    """Run `python -m NAME ARGUMENTS` in this process.  It ends by itself, with its own exit status and under its own name."""
    import runpy
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name='__main__', alter_sys=True)


def gradcheck(options):
    """Print a table for each op, or JSON, and return the exit status: 1 if a gradient is wrong, else 0."""
    from pyops.differences import check_op, every_op, find_op
    from pyops.flags import did_you_mean
    ops = []
    for name in options.ops:
        if (op := find_op(name)) is None:
            names = [op.__name__ for op in every_op()]
            expected = did_you_mean(name, names) or f'; expected one of: {", ".join(names)}'
            raise UserError(f'{name}: there is no such op{expected}')
        ops.append(op)
    reports = {}
    for op in ops or every_op():
        report = reports[op.__name__] = check_op(op)
        if not options.json:
            print(f'{op.__name__}\n{report}\n')
    wrong = [name for name, report in reports.items() if not report]
    if options.json:
        import json
        print(json.dumps({'passed': not wrong, 'ops': [{'op': name} | report.as_json() for name, report in reports.items()]},
                         allow_nan=False))
    else:
        count = f'{len(reports)} op' + 's' * (len(reports) > 1)
        print(f'{len(wrong)} of {count} wrong: {", ".join(wrong)}' if wrong else f'{count} right')
    return 1 if wrong else 0


if __name__ == '__main__':
    main()
