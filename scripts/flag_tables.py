"""Write the flag tables of docs/programs.md from the argument parsers of the programs.

    python -m scripts.flag_tables             rewrite the text between <!-- flags --> and <!-- /flags -->
    python -m scripts.flag_tables --check     write nothing; exit with status 2 if the page is out of date

Flags are listed by argument group.  A group that several programs share is listed once.
"""
import argparse
import re
from pathlib import Path
from typing import NamedTuple

import mnist.resnet
import mnist.train
import pyops.__main__
import pyops.data.__main__
import seq2seq.average
import seq2seq.evaluate
import seq2seq.train
import seq2seq.translate
import transformer.average
import transformer.evaluate
import transformer.from_marian
import transformer.train
import transformer.translate
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'scripts.flag_tables'
PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'programs.md'
COMMON = argparse._HelpAction, argparse._VersionAction      # flags of every program, which the tables leave out
UNTITLED = 'options', 'positional arguments'                # argparse's own groups
DEFAULT = re.compile(r'\s*\(default:? (.*)\)$', re.S)
# quoted text, environment variables, flags, paths, and a lone star are set as code
CODE = re.compile(r"""(?<!\w)('[^' ]+'|\$?[A-Z]+_[A-Z_]+(?:=\w+)?|--[a-z][a-z-]*|\./\w+|\*(?=,|$))""")


class Row(NamedTuple):
    names: str          # as in '`-e`, `--epochs N`'
    meaning: str        # the help text without its default
    default: str


class Group(NamedTuple):
    title: str          # '' for the flags of a program outside groups
    description: str
    rows: tuple[Row, ...]

    def shape(self):
        """Groups of equal shape share a table: they differ at most in defaults."""
        return self.title, tuple(row[:2] for row in self.rows)


def parsers():
    """Return {program: ArgumentParser}; a program with subcommands has an entry for each, such as 'pyops inspect draw'."""
    programs = (mnist.train, mnist.resnet, seq2seq.train, transformer.train, seq2seq.translate, transformer.translate,
                seq2seq.evaluate, transformer.evaluate, seq2seq.average, transformer.average, transformer.from_marian)
    return {**{program.PROGRAM: program.parser() for program in programs},
            **dict(leaves('pyops.data', pyops.data.__main__.parser())), **dict(leaves('pyops', pyops.__main__.parser()))}


def leaves(name, parser):
    """Yield (name, parser) of a parser without subcommands, else of each of its subcommands."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        yield name, parser
    for command, child in (item for action in commands for item in action.choices.items()):
        yield from leaves(f'{name} {command}', child)


def groups(parser):
    """Return the Groups of a parser, without --help and --version."""
    found, untitled = [], []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, COMMON)]
        if group.title in UNTITLED:
            untitled += actions
        elif actions:
            found.append(Group(group.title, group.description or '', tuple(row(parser, action) for action in actions)))
    return [Group('', '', tuple(row(parser, action) for action in untitled)), *found] if untitled else found


def row(parser, action):
    formatter = parser._get_formatter()
    if action.option_strings:
        value = '' if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
        names = [f'{name} {value}'.strip() if name == action.option_strings[-1] else name for name in action.option_strings]
    else:
        names = [formatter._format_args(action, action.dest.upper())]
    text = ' '.join(formatter._expand_help(action).split())
    default = DEFAULT.search(text)
    return Row(', '.join(f'`{name}`' for name in names), DEFAULT.sub('', text), default[1] if default else '')


def listed(programs):
    return ', '.join(f'`{program}`' for program in programs)


def merged(rows, programs):
    """Return a row for several programs; the default of each is named if they differ."""
    by_default = {}
    for program, one in zip(programs, rows, strict=True):
        by_default.setdefault(one.default, []).append(program)
    if len(by_default) == 1:
        return rows[0]
    return rows[0]._replace(default='; '.join(f'{", ".join(names)}: {default}' for default, names in by_default.items()))


def markdown(text):
    """Return the text of a help message as Markdown."""
    return re.sub(r'\bdocs/(\w+\.md)', r'[\1](\1)', CODE.sub(r'`\1`', text))


def table(rows):
    """Return the lines of a table, without a column of defaults if there are none."""
    has_defaults = any(row.default for row in rows)
    head = ['flag', 'meaning', 'default'][:2 + has_defaults]
    yield f'| {" | ".join(head)} |'
    yield '|---' * len(head) + '|'
    for names, *texts in rows:
        cells = [cell.replace('|', r'\|') for cell in (names, *map(markdown, texts))][:len(head)]
        yield f'| {" | ".join(cells)} |'.replace('|  |', '| |')


def text():
    """Return the Markdown of all tables."""
    tables = {}             # shape of a group -> {program: the group}
    for program, parser in parsers().items():
        for group in groups(parser):
            key = group.shape()
            tables.setdefault(key if group.title else ('', *key), {})[program] = group
    titles = [key[0] for key in tables]
    lines = []
    for by_program in sorted(tables.values(), key=lambda by_program: len(by_program) > 2):     # the most general ones last
        group, programs = next(iter(by_program.values())), list(by_program)
        title, about = group.title, markdown(group.description)
        if titles.count(title) > 1 or not title:
            title = f'{title} of {" and ".join(programs)}' if title else ' and '.join(programs)
        else:
            about = f'For {listed(programs)}. {about}'.strip()
        rows = [merged(rows, programs) for rows in zip(*(other.rows for other in by_program.values()), strict=True)]
        lines += [f'### Flags: {title}', '', *([about, ''] if about else []), *table(rows), '']
    return '\n'.join(['', *lines])


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Write the flag tables of docs/programs.md.')
    p.add_argument('--check', action='store_true', help='write nothing; exit with status 2 if the page is out of date')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help='page to update (default docs/programs.md)')
    args = p.parse_args(argv)
    update(args.page, 'flags', text(), f'python -m {PROGRAM}', args.check)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
