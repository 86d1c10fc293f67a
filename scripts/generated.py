"""Text of a page that a program writes, between the lines <!-- NAME --> and <!-- /NAME -->."""
import textwrap

from pyops.errors import UserError


def paragraph(text, first=''):
    """Return a text in lines of at most 128 characters.  first: what the first line begins with, as the '- ' of a list."""
    return textwrap.fill(first + text, 128, subsequent_indent=' ' * len(first), break_long_words=False, break_on_hyphens=False)


def text(path, name):
    """Return the text between the two lines of the page at path (a pathlib.Path)."""
    return _parts(path, name)[1]


def update(path, name, text, command, check=False):
    """Replace the text between the two lines of the page at path (a pathlib.Path), and print a line if the page changed.

    check: write nothing; UserError if the page has another text.  command: the command line that updates the page.
    """
    before, old, after = _parts(path, name)
    if text == old:
        return
    if check:
        raise UserError(f'{path}: the text after <!-- {name} --> is out of date; update it with: {command}')
    path.write_text(before + text + after)
    print(f'{path}: updated')


def _parts(path, name):
    """Return a page in three parts: up to the first line, between the two lines, and from the second line on."""
    begin, end = f'<!-- {name} -->\n', f'<!-- /{name} -->\n'
    try:
        page = path.read_text()
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); name another file with --page') from error
    before, found_begin, rest = page.partition(begin)
    text, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UserError(f'{path}: expected the lines {begin.strip()} and {end.strip()}; add them where the text belongs')
    return before + begin, text, end + after
