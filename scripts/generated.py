"""Text of a page that a program writes, between the lines <!-- NAME --> and <!-- /NAME -->."""
import textwrap

from pyops.errors import UserError


def paragraph(text, first=''):
    """Return a text in lines of at most 128 characters.  first: what the first line begins with, as the '- ' of a list."""
    return textwrap.fill(first + text, 128, subsequent_indent=' ' * len(first), break_long_words=False, break_on_hyphens=False)


def update(path, name, text, command, check=False):
    """Replace the text between the two lines of the page at path (a pathlib.Path), and print a line if the page changed.

    check: write nothing; UserError if the page has another text.  command: the command line that updates the page.
    """
    begin, end = f'<!-- {name} -->\n', f'<!-- /{name} -->\n'
    try:
        page = path.read_text()
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); name another file with --page') from error
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UserError(f'{path}: expected the lines {begin.strip()} and {end.strip()}; add them where the text belongs')
    new = before + begin + text + end + after
    if new == page:
        return
    if check:
        raise UserError(f'{path}: the text after {begin.strip()} is out of date; update it with: {command}')
    path.write_text(new)
    print(f'{path}: updated')
