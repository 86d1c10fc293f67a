"""Tools of the package.

python -m pyops gradcheck [OP ...]      gradients of ops against central differences, all ops by default
python -m pyops inspect ...             saved tensors: draw, serve, compare
python -m pyops serve CKPT              translations over HTTP
"""
import sys

from pyops.errors import UserError, exits_cleanly


def main(arguments=None):
    """Run the command line.  Invalid input prints one line to stderr and exits with status 2."""
    with exits_cleanly('pyops'):
        status = run(arguments)
    sys.exit(status)


def parser():
    # imported here so that exits_cleanly can name a missing package in one line
    from pyops.flags import ArgumentParser
    from pyops.inspect import command
    from pyops.serve import command as serve
    p = ArgumentParser(prog='python -m pyops', description='Tools of the package.',
                       epilog='Data sets: python -m pyops.data.  Programs: python -m mnist, seq2seq or transformer.')
    commands = p.add_commands()
    check = commands.add_parser('gradcheck', help='check gradients of ops against central differences in float64')
    check.add_argument('ops', metavar='OP', nargs='*', help='name of an op, such as linear, gru or softmax (default: all)')
    check.set_defaults(run=gradcheck)
    command.add_commands(commands.add_parser('inspect', help='look at saved tensors: draw, serve, compare'))
    serve.add_flags(commands.add_parser('serve', help='translate with a checkpoint over HTTP'))
    return p


def run(arguments):
    options = parser().parse_args(arguments)
    return options.run(options)


def gradcheck(options):
    """Print a table for each op and return the exit status: 1 if a gradient is wrong, else 0."""
    from pyops.differences import check_op, every_op, find_op
    ops = [find_op(name) for name in options.ops] or every_op()
    if None in ops:
        raise UserError(f'{options.ops[ops.index(None)]}: there is no such op; want one of: '
                        f'{", ".join(op.__name__ for op in every_op())}')
    wrong = []
    for op in ops:
        report = check_op(op)
        print(f'{op.__name__}\n{report}\n')
        if not report:
            wrong.append(op.__name__)
    count = f'{len(ops)} op' + 's' * (len(ops) > 1)
    print(f'{len(wrong)} of {count} wrong: {", ".join(wrong)}' if wrong else f'{count} right')
    return 1 if wrong else 0


if __name__ == '__main__':
    main()
