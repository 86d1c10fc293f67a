"""Fetch data sets.

python -m pyops.data list
python -m pyops.data get fra-eng|mnist [--data-dir DIR] [--mirror URL]...
"""
from pyops.errors import exits_cleanly


def main(arguments=None):
    """Run the command line; bad input ends with one line on stderr and exit status 2."""
    with exits_cleanly('pyops.data'):
        run(arguments)


def run(arguments):
    # not above: a package that is missing is to be named in one line
    from pyops.data import fetch
    from pyops.training import ArgumentParser
    parser = ArgumentParser(prog='python -m pyops.data', description='Fetch data sets.')
    commands = parser.add_commands()
    show = commands.add_parser('list', help='say what there is, under which licence, and what is here already')
    load = commands.add_parser('get', help='download a data set, or check the one that is here')
    load.add_argument('name', help=f'one of: {", ".join(fetch.DATASETS)}')
    load.add_argument('--mirror', metavar='URL', action='append', default=[],
                      help='try this first: the URL of the file, or of its folder with a slash at the end')
    for command in (show, load):
        command.add_argument('--data-dir', metavar='DIR', help='default: $PYOPS_DATA, or else ./data')
    show.set_defaults(run=lambda options: print('\n'.join(fetch.describe(options.data_dir))))
    load.set_defaults(run=lambda options: fetch.get(options.name, options.data_dir, options.mirror))
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == '__main__':
    main()
