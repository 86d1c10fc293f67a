"""Fetch data sets, and pack a corpus for training.

python -m pyops.data list
python -m pyops.data get fra-eng|mnist|tatoeba-test [--data-dir DIR] [--mirror URL]...
python -m pyops.data pack TEXT FOLDER
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from pyops.errors import exits_cleanly

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from pyops.flags import ArgumentParser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends with one line on stderr and exit status 2."""
    with exits_cleanly('pyops.data'):
        run(arguments)


def parser() -> ArgumentParser:
    # imported here so that exits_cleanly can name a missing package in one line
    from pyops.data import fetch
    from pyops.flags import ArgumentParser, int_up_to, positive_int
    p = ArgumentParser(prog='python -m pyops.data', description='Fetch data sets, and pack a corpus for training.')
    commands = p.add_commands()
    show = commands.add_parser('list', help='print the data sets, their licences, and which of them are found')
    load = commands.add_parser('get', help='download a data set, or check the one that is found')
    *others, last = fetch.DATASETS
    load.add_argument('name', help=f'name of the data set: {", ".join(others)} or {last}')
    load.add_argument('--mirror', metavar='URL', action='append', default=[],
                      help='URL to try first: of the file, or of its folder with a slash at the end; can be repeated')
    for command in (show, load):
        command.add_argument('--data-dir', metavar='DIR', help='folder of the data sets (default: $PYOPS_DATA, else ./data)')
    write = commands.add_parser('pack', help='encode sentence pairs into files that training maps into memory')
    write.add_argument('text', help='sentence pairs, one per line, separated by a tab')
    write.add_argument('folder', help='folder of the encoded pairs, for -f of the training programs')
    write.add_argument('--validation', metavar='TEXT', help='other sentence pairs, for the validation loss (default: none)')
    write.add_argument('--tokenizer', choices=('word', 'bpe'), default='word', help='as for training (default %(default)s)')
    write.add_argument('--min-count', type=positive_int, default=3, metavar='N',
                       help='word: treat words that occur less often as unknown (default %(default)s)')
    write.add_argument('--vocabulary', type=int_up_to(65536), default=12000, metavar='N',
                       help='bpe: number of subwords (default %(default)s)')
    write.add_argument('--num-steps', type=int_up_to(1000), metavar='N',
                       help='tokens per sentence, end mark included; longer sentences are cut (default 9; bpe 64)')
    write.set_defaults(run=_pack)
    show.set_defaults(run=lambda options: print('\n'.join(fetch.describe(options.data_dir))))
    load.set_defaults(run=lambda options: fetch.get(options.name, options.data_dir, options.mirror))
    return p


def _pack(options: Namespace) -> None:
    from pyops.text.mapped import pack  # here: the other commands need no library
    settings = dict(tokenizer=options.tokenizer, min_count=options.min_count, vocabulary=options.vocabulary,
                    num_steps=options.num_steps or {'word': 9, 'bpe': 64}[options.tokenizer])
    print(pack(options.text, options.folder, settings, options.validation))


def run(arguments: Sequence[str] | None) -> None:
    options = parser().parse_args(arguments)
    options.run(options)


if __name__ == '__main__':
    main()
