"""Figures of docs/reliability.md, with date and machine; those that add up over runs: no two runs have a seed in common."""
import datetime
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from pyops.doctor import cpu_name
from pyops.errors import UserError
from pyops.flags import non_negative_int
from scripts.generated import paragraph, text, update
from scripts.workers import cores

ROOT = Path(__file__).resolve().parents[1]
_PAGE = 'docs/reliability.md'
PAGE = ROOT / _PAGE
_RUNS = re.compile(r'seeds (\d+) to (\d+), (\d+) runs?, commits ([\w-]+) to ([\w-]+)')


class Runs(NamedTuple):
    """The runs that figures are from.   They used each seed from `first` to `last` once, and began at these commits"""
    first: int
    last: int
    count: int
    commits: tuple[str, str]

    @classmethod
    def one(cls, first, last):
        """Return a run of this commit with these seeds."""
        return cls(first, last, 1, (commit(), commit()))

    @classmethod
    def read(cls, text):
        """Return the runs that a text names.   UserError if it names none"""
        if not (found := _RUNS.search(text)):
            raise UserError(f'expected "seeds N to N, N runs, commits C to C" in the figures that a run is added to, got '
                            f'{text[:100]!r}; restore the page from the history')
        first, last, count, *commits = found.groups()
        return cls(int(first), int(last), int(count), tuple(commits))

    def __add__(self, later):
        """Return both.   UserError if the seeds of the later runs do not begin where these end"""
        if later.first != self.last + 1:
            raise UserError(f'the page has seeds {self.first} to {self.last} now, and this run began with {later.first}: '
                            'its figures are not added, since another run has saved; start it again')
        return Runs(self.first, later.last, self.count + later.count, (self.commits[0], later.commits[1]))

    def __str__(self):
        return (f'seeds {self.first} to {self.last}, {self.count} run{"s" * (self.count != 1)}, '
                f'commits {self.commits[0]} to {self.commits[1]}')


def commit():
    """Return the name of the commit that is checked out, with -changed if the sources differ from it; or 'unknown'."""
    def git(*arguments):
        return subprocess.run(['git', *arguments], cwd=ROOT, capture_output=True, text=True)
    try:
        name = git('rev-parse', '--short', 'HEAD')
        differs = git('diff', '--quiet', 'HEAD', '--', '.', f':!{_PAGE}').returncode
    except OSError:
        return 'unknown'
    return 'unknown' if name.returncode else name.stdout.strip() + '-changed' * bool(differs)


def add_flags(p):
    """Add --seed, --save and --page to a parser.   The first seed is first_seed's"""
    seeds = p.add_mutually_exclusive_group()
    seeds.add_argument('--seed', type=non_negative_int, default=0, metavar='N', help='first seed (default %(default)s)')
    seeds.add_argument('--save', action='store_true',
                       help='use the seeds that follow the last one of the page, and add the figures to its own')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help=f'page for --save (default {_PAGE})')


def first_seed(args, name):
    """Return the first seed of a run: with --save, the first that the figures of the page with this name do not have."""
    return Runs.read(text(args.page, name)).last + 1 if args.save else args.seed


def save(args, name, found, command):
    """With --save, add figures to the page's.   found: has + and str(); its class reads a text with read(text)"""
    if args.save:
        write(name, str(type(found).read(text(args.page, name)) + found), command, args.page)


def write(name, figures, command, page=PAGE):
    """Replace the figures of the page with this name, a text that ends in a newline, and add when and where they were found.
    command: the command line that writes them"""
    update(page, name, f'{figures}\n{stamp()}\n', command)


def stamp():
    """Return the date and the machine of a run that ends now."""
    count = cores()
    return paragraph(f'Saved on {datetime.date.today()}; the machine: {cpu_name()}, {count} core{"s" * (count != 1)}.')
