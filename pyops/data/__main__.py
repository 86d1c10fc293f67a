"""Fetch data sets.

python -m pyops.data list
python -m pyops.data get fra-eng|mnist|tatoeba-test [--data-dir DIR] [--mirror URL]...
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from pyops.errors import exits_cleanly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.flags import ArgumentParser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends with one line on stderr and exit status 2."""
    with exits_cleanly('pyops.data'):
        run(arguments)


def parser() -> ArgumentParser:
    # imported here so that exits_cleanly can name a missing package in one line
    from pyops.data import fetch
    from pyops.flags import ArgumentParser
    p = ArgumentParser(prog='python -m pyops.data', description='Fetch data sets.')
    commands = p.add_commands()
    show = commands.add_parser('list', help='print the data sets, their licences, and which of them are found')
    load = commands.add_parser('get', help='download a data set, or check the one that is found')
    *others, last = fetch.DATASETS
    load.add_argument('name', help=f'name of the data set: {", ".join(others)} or {last}')
    load.add_argument('--mirror', metavar='URL', action='append', default=[],
                      help='URL to try first: of the file, or of its folder with a slash at the end; can be repeated')
    for command in (show, load):
        command.add_argument('--data-dir', metavar='DIR', help='folder of the data sets (default: $PYOPS_DATA, else ./data)')
    show.set_defaults(run=lambda options: print('\n'.join(fetch.describe(options.data_dir))))
    load.set_defaults(run=lambda options: fetch.get(options.name, options.data_dir, options.mirror))
    return p


def run(arguments: Sequence[str] | None) -> None:
    options = parser().parse_args(arguments)
    options.run(options)


if __name__ == '__main__':
    main()
